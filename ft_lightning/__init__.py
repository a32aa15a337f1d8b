"""Lightning front end of ft_core."""
