"""Write run logs during a run; read and compare them afterwards. No code in this package measures."""
