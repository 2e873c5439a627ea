"""Training: one YAML file in, a checkpoint folder out. `codec train recipes/speech_16k.yaml` runs this."""

from codec.train.augment import augment as augment
from codec.train.augment import augmentations as augmentations
from codec.train.checking import check as check
from codec.train.checking import profile as profile
from codec.train.config import AdversarialConfig as AdversarialConfig
from codec.train.config import AugmentConfig as AugmentConfig
from codec.train.config import DataConfig as DataConfig
from codec.train.config import OptimConfig as OptimConfig
from codec.train.config import RunConfig as RunConfig
from codec.train.config import TrainConfig as TrainConfig
from codec.train.config import TrainerConfig as TrainerConfig
from codec.train.config import load_config as load_config
from codec.train.module import CodecTraining as CodecTraining
from codec.train.run import keep_freed_memory as keep_freed_memory
from codec.train.run import train as train
