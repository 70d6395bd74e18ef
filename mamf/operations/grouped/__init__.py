"""Products of groups of tokens, each with the weights of its own expert."""
