"""wave ↔ codes ↔ mel: the `Codec` interface and the SoundStream model. `codec.loading` loads any codec by name."""

from codec.model.config import SoundStreamConfig as SoundStreamConfig
from codec.model.interface import Codec as Codec
from codec.model.interface import Codes as Codes
from codec.model.interface import StreamDecoder as StreamDecoder
from codec.model.interface import StreamEncoder as StreamEncoder
from codec.model.soundstream import SoundStream as SoundStream
from codec.model.soundstream import load_checkpoint as load_checkpoint
