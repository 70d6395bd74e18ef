"""What is done to mamf on purpose, seeded: damaged logs, bad command lines, kills in virtual time and real ones."""
