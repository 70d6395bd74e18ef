"""A module that damaged logs name as a kernel. mamf must not import it, because a log could then run any code."""
