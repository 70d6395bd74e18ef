"""What makes a contributed run log believable, where it belongs, and the table of them all."""
