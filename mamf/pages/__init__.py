"""Pages that people look at: reports of logs, and the site of results/."""
