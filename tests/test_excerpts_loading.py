"""Loaders: workers, ranks, resuming, Lightning."""

import multiprocessing
import socket
import warnings

import pytest
import torch
from conftest import DATA
from test_excerpts import Ramp

from codec.errors import InputError
from codec.excerpts import Choice, RandomExcerpts, Uniform
from codec.sources import AudioFiles

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ITEMS = {"a": 1000, "b": 160, "c": 4000, "d": 330}


def excerpts(**changes) -> RandomExcerpts:
    settings = {"batch_size": 4, "seed": 7, "rngs": {"gain": Uniform(-1, 1)}, **changes}
    return RandomExcerpts({"x": Ramp(ITEMS, 100)}, 1, **settings)


def content(batch) -> tuple:
    return tuple(batch["key"]), tuple(batch["start"].tolist()), tuple(batch["gain"].tolist())


EXPECTED = [content(excerpts()[n]) for n in range(60)]


def share(num_workers, rank, world_size) -> list:
    loader = excerpts().loader(
        num_batches=5, num_workers=num_workers, rank=rank, world_size=world_size, start_method="fork"
    )
    batches = [content(batch) for batch in loader]
    assert len(batches) == len(loader) == 5
    return batches


@pytest.mark.parametrize("num_workers", [0, 1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_workers_and_ranks_change_nothing(num_workers, world_size):
    for rank in range(world_size):
        assert share(num_workers, rank, world_size) == EXPECTED[rank : 5 * world_size : world_size]


def test_iterations_go_on_unless_the_span_is_fixed():
    loader = excerpts().loader(epoch_batches=4)
    assert len(loader) == 4
    epochs = [[content(batch) for batch in loader] for _ in range(3)]
    assert epochs == [EXPECTED[0:4], EXPECTED[4:8], EXPECTED[8:12]]
    fixed = excerpts().loader(start_batch=3, num_batches=2)
    assert [[content(batch) for batch in fixed] for _ in range(2)] == [EXPECTED[3:5]] * 2
    with pytest.raises(TypeError, match="endless loader has no length; give epoch_batches"):
        len(excerpts().loader())


@pytest.mark.parametrize("epoch_batches", [None, 5])
@pytest.mark.parametrize("consumed", [0, 1, 3, 7])
@pytest.mark.parametrize(("before", "after"), [((0, 1), (2, 1)), ((2, 2), (0, 3)), ((0, 3), (1, 2)), ((0, 1), (0, 4))])
def test_resuming_on_another_topology_repeats_and_skips_nothing(epoch_batches, consumed, before, after):
    """`consumed` batches per rank, then a state, then other workers and ranks: together all batches once."""
    (workers, ranks), (new_workers, new_ranks) = before, after
    seen, states = [], []
    for rank in range(ranks):
        loader = excerpts().loader(epoch_batches=epoch_batches, num_workers=workers, rank=rank, world_size=ranks)
        left = consumed
        while left:
            for batch in loader:
                seen.append(content(batch))
                left -= 1
                if not left:
                    break
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    lengths = set()
    for rank in range(new_ranks):
        loader = excerpts().loader(
            epoch_batches=epoch_batches, num_workers=new_workers, rank=rank, world_size=new_ranks
        )
        loader.load_state_dict(states[0])
        mine = []
        for batch in loader:
            mine.append(content(batch))
            if epoch_batches is None and len(mine) == 4:
                break
        lengths.add(len(mine))
        seen += mine
    assert len(lengths) == 1
    assert sorted(seen) == sorted(EXPECTED[: len(seen)])


@pytest.mark.parametrize("finished", [0, 1, 3])
def test_an_interrupted_epoch_is_finished_not_shortened(finished):
    loader = excerpts().loader(epoch_batches=5)
    for _ in range(finished):
        list(loader)
    for i, _ in enumerate(loader):
        if i == 2:
            break
    state = loader.state_dict()
    done = 5 * finished
    assert state == {"seed": 7, "batch_size": 4, "batches": done + 3, "epoch_start": done}
    resumed = excerpts().loader(epoch_batches=5)
    resumed.load_state_dict(state)
    assert [len(list(resumed)) for _ in range(3)] == [2, 5, 5]
    assert resumed.state_dict()["batches"] == done + 15


def test_batches_in_flight_are_not_consumed():
    """Workers fetch ahead; the state counts what was handed out."""
    loader = excerpts().loader(num_workers=2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    assert loader.state_dict()["batches"] == 3
    del iterator


def test_bad_states_and_arguments():
    loader = excerpts().loader()
    with pytest.raises(InputError, match=r"the state has seed 8, this loader 7: .*make the loader with seed=8"):
        loader.load_state_dict(excerpts(seed=8).loader().state_dict())
    with pytest.raises(InputError, match=r"state has \['epoch'\]; it must have"):
        loader.load_state_dict({"epoch": 3})
    for options, message in (
        ({"rank": 1}, "rank=1 and world_size=None; give both or neither"),
        ({"rank": 2, "world_size": 2}, "rank is 2; it must be from 0 to world_size - 1 = 1"),
        ({"epoch_batches": 0}, "epoch_batches is 0; it must be at least 1"),
        ({"num_batches": -1}, "num_batches is -1; it must be at least 0"),
        ({"num_batches": 3, "epoch_batches": 3}, "leave out start_batch and num_batches"),
    ):
        with pytest.raises(InputError, match=message):
            excerpts().loader(**options)


class Threads(Ramp):
    def get(self, excerpts):
        return torch.tensor([torch.get_num_threads()] * len(excerpts))


def test_workers_use_one_thread():
    loader = RandomExcerpts({"x": Threads(ITEMS, 100)}, 1, batch_size=2, seed=0)
    (batch,) = loader.loader(num_batches=1, num_workers=1)
    assert batch["x"].tolist() == [1, 1]


class Memory(Ramp):
    """What the process that reads has grown to, in kB of its own pages."""

    def get(self, excerpts):
        with open("/proc/self/smaps_rollup") as file:
            own = sum(int(line.split()[1]) for line in file if line.startswith("Private_"))
        return torch.full((len(excerpts),), own)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_the_memory_of_workers_is_flat(start_method):
    """Many keys, since Python's counts of references to them are what copies a forked worker's memory."""
    files = AudioFiles({str(n): DATA / "speech_it_male_first-in-queue_16k.wav" for n in range(20_000)})
    lengths = dict(zip(files.keys(), files.lengths().tolist(), strict=True))
    sources = {"x": files, "memory": Memory(lengths, 16000)}
    loader = RandomExcerpts(sources, "0.02", batch_size=64, seed=0, rngs={"gain": Uniform(-1, 1)})
    batches = loader.loader(num_batches=400, num_workers=1, start_method=start_method)
    kilobytes = torch.stack([batch["memory"][0] for batch in batches])
    assert kilobytes[0] > 5000
    # Pages of the parent that a forked worker still touches for the first time; 160 bytes per draw would be more.
    assert kilobytes[300:].float().mean() - kilobytes[200:300].float().mean() < 1024


def _rank_of_the_process_group(rank, port, queue):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    queue.put((rank, [content(batch) for batch in excerpts().loader(num_batches=3)]))
    torch.distributed.destroy_process_group()


def test_ranks_are_those_of_torch_distributed():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_rank_of_the_process_group, args=(r, port, queue)) for r in range(2)]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert found == {0: EXPECTED[0:6:2], 1: EXPECTED[1:6:2]}


def test_lightning_needs_no_glue(tmp_path):
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append(content(batch))
            return self.weight.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(max_steps, checkpoint=None):
        module = Module()
        trainer = L.Trainer(
            accelerator="cpu", max_steps=max_steps, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, excerpts().loader(epoch_batches=5, num_workers=1), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module.seen

    first = run(8)
    assert first + run(14, tmp_path / "last.ckpt") == EXPECTED[:14]


def test_choice_weights_are_checked():
    for values, weights in (((), None), ((1.0,), (0.0,)), ((1.0, 2.0), (1.0,)), ((1.0, 2.0), (2.0, -1.0))):
        with pytest.raises(InputError, match=r"Choice\("):
            Choice(values, weights)
