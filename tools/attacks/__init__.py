"""What is done to mamf on purpose, seeded: damaged logs, bad command lines, kills, inputs without bound, secrets."""
