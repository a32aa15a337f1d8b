"""The pure modules, exhaustively."""
