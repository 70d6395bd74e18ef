"""Check that a command refuses bad input."""


def assert_refused(result, *texts, code=2):
    """Check that a command printed nothing on stdout, and one line on stderr that contains all given texts.

    ``result``: the exit code, stdout and stderr of the command. ``code``: the expected exit code.
    """
    exit_code, out, err = result
    assert (exit_code, out, len(err.strip().splitlines())) == (code, "", 1), err
    for text in texts:
        assert text in err
