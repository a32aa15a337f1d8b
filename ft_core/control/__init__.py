"""The control plane: lighthouse, leader of a replica group, and a rank's link to them."""
