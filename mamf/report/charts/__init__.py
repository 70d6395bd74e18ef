"""What a picture shows, as data, and how it is drawn."""
