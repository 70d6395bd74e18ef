"""What a command says that refuses what it is asked for."""


def assert_refused(found, *told, code=2):
    """Nothing on stdout and one line on stderr, with these texts. ``found``: exit code, stdout, stderr."""
    ended, out, err = found
    assert (ended, out, len(err.strip().splitlines())) == (code, "", 1), err
    for text in told:
        assert text in err
