"""The commands of the mamf command line, one module per command. mamf imports only the module of the typed command."""
