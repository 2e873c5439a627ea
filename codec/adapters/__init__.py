"""Pretrained codecs of others behind the `Codec` interface. `codec.load_codec` loads them by name, folder or file."""

from codec.adapters.base import Adapter as Adapter
