"""Test how mamf counts the tokens and samples of a batch, which may be nested, and when it reports them as unknown."""

import math
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest

from mamf.errors import UsageError
from mamf.integrations.metered import read_batch_sizes


class Tensor:
    """A fake tensor with the only attributes that ``read_batch_sizes`` reads: shape and dtype."""

    def __init__(self, *shape, dtype="torch.int64"):
        self.shape, self.dtype = shape, dtype


IDS, LABELS, CLASSES = Tensor(4, 128), Tensor(4, 32), Tensor(4)
IMAGES = Tensor(4, 3, 32, 32, dtype="torch.float32")
Pair = namedtuple("Pair", "input_ids labels")


@dataclass
class Batch:
    images: Tensor
    tokens: Tensor


@pytest.mark.parametrize(
    "batch",
    [
        IDS,
        {"input_ids": IDS, "labels": IDS},
        UserDict(labels=CLASSES, input_ids=IDS),
        {"inputs_embeds": Tensor(4, 128, 64, dtype="torch.bfloat16")},
        {"input": IDS},
        (IDS, IDS),
        [IDS, IDS],
        Pair(IDS, CLASSES),
        Batch(IMAGES, IDS),
        {"batch": {"inputs": {"input_ids": IDS}}},
        ({"input_ids": IDS}, CLASSES),
    ],
)
def test_tokens_are_found_whatever_holds_them(batch):
    found = read_batch_sizes(batch)
    assert (found.token_count, found.sample_count, found.sequence_counts) == (4 * 128, 4, [(4, 128)])


def test_batches_within_a_batch_are_added_up():
    found = read_batch_sizes([{"input_ids": Tensor(2, 100)}, {"input_ids": Tensor(3, 50)}])
    assert (found.token_count, found.sample_count, found.sequence_counts) == (350, 5, [(2, 100), (3, 50)])


def test_ids_of_other_dimensions_are_sequences_along_the_last():
    assert read_batch_sizes({"input_ids": Tensor(2, 4, 64)}).sequence_counts == [(8, 64)]
    assert read_batch_sizes({"input_ids": Tensor(512)}).sequence_counts == [(1, 512)]


@pytest.mark.parametrize("batch", [IMAGES, (IMAGES, CLASSES), {"pixel_values": IMAGES, "labels": CLASSES}])
def test_images_are_samples_and_no_tokens(batch):
    found = read_batch_sizes(batch)
    assert math.isnan(found.token_count)
    assert (found.sample_count, found.sequence_counts) == (4, [])


def test_the_targets_of_a_decoder_are_its_inputs_or_its_labels():
    assert read_batch_sizes({"input_ids": IDS, "labels": LABELS}).target_length == 32
    assert read_batch_sizes({"input_ids": IDS, "labels": CLASSES, "decoder_input_ids": LABELS}).target_length == 32
    assert read_batch_sizes({"input_ids": IDS, "labels": CLASSES}).target_length is None


@pytest.mark.parametrize(
    ("tokens", "samples", "found"),
    [
        (1024, None, (1024, 4, [(4, 256)])),
        (1022, None, (1022, 4, [])),
        ((8, 64), None, (512, 8, [(8, 64)])),
        (lambda batch: batch[0].shape[0] * 10, None, (40, 4, [(4, 10)])),
        (lambda batch: Tensor(2, 16), 6, (32, 6, [(2, 16)])),
        (None, lambda batch: 5, (math.nan, 5, [])),
        (lambda batch: None, None, (math.nan, 4, [])),
    ],
)
def test_what_is_given_is_taken(tokens, samples, found):
    taken = read_batch_sizes((IMAGES, CLASSES), tokens, samples)
    assert (taken.token_count, taken.sample_count) == pytest.approx(found[:2], nan_ok=True)
    assert taken.sequence_counts == found[2]


@pytest.mark.parametrize("tokens", [0, -1, 2.5, "many", (1, 2, 3), (0, 8), True])
def test_what_is_no_count_is_refused(tokens):
    with pytest.raises(UsageError, match="must be a whole number above 0"):
        read_batch_sizes(IDS, tokens)
