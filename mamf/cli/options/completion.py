"""The options of ``mamf completion``."""

from __future__ import annotations

import argparse

EXAMPLES = """examples:
  eval "$(mamf completion bash)"                             in ~/.bashrc
  eval "$(mamf completion zsh)"                              in ~/.zshrc
  mamf completion fish > ~/.config/fish/completions/mamf.fish
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
