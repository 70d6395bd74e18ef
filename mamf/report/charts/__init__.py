"""Charts as data, and their drawing."""
