"""Products beside other work: two queues of one device at once."""
