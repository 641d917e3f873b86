"""What a person can mend."""


class UserError(RuntimeError):
    """An error to be said in a line on the command line, without a traceback.

    So are ValueError and OSError; this is for what is neither.
    """
