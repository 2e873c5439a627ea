"""The exception tree. Every message gives the value found, the limit it broke and the remedy."""


class CodecError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(CodecError, ValueError):
    """An argument has a wrong shape, dtype, range or combination."""


class AudioFileError(CodecError):
    """An audio file can't be read or written as asked."""


class TokenFileError(CodecError):
    """A token file is damaged, foreign, of another version, or asked for what it doesn't hold."""


class CheckpointError(CodecError):
    """A checkpoint is missing, damaged, or of another architecture."""


class ConfigError(CodecError):
    """A configuration file or an override holds an unknown key or a bad value."""


class DecodeError(CodecError):
    """What was decoded isn't finite, or the device lacks the memory for it."""


class TrainingError(CodecError):
    """Training can't start or go on: empty data, a non-finite loss."""
