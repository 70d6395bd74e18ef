"""Check that a command refuses bad input."""


def assert_refused(found, *told, code=2):
    """Check that a command printed nothing on stdout, and one line on stderr that contains all given texts.

    ``found``: the exit code, stdout and stderr of the command. ``code``: the expected exit code.
    """
    ended, out, err = found
    assert (ended, out, len(err.strip().splitlines())) == (code, "", 1), err
    for text in told:
        assert text in err
