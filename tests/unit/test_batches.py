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
def test_tokens_are_counted_in_every_kind_of_batch(batch):
    sizes = read_batch_sizes(batch)
    assert (sizes.token_count, sizes.sample_count, sizes.sequence_counts) == (4 * 128, 4, [(4, 128)])


def test_batches_within_a_batch_are_added_up():
    sizes = read_batch_sizes([{"input_ids": Tensor(2, 100)}, {"input_ids": Tensor(3, 50)}])
    assert (sizes.token_count, sizes.sample_count, sizes.sequence_counts) == (350, 5, [(2, 100), (3, 50)])


def test_token_ids_are_sequences_along_the_last_dimension():
    assert read_batch_sizes({"input_ids": Tensor(2, 4, 64)}).sequence_counts == [(8, 64)]
    assert read_batch_sizes({"input_ids": Tensor(512)}).sequence_counts == [(1, 512)]


@pytest.mark.parametrize("batch", [IMAGES, (IMAGES, CLASSES), {"pixel_values": IMAGES, "labels": CLASSES}])
def test_images_count_as_samples_but_not_as_tokens(batch):
    sizes = read_batch_sizes(batch)
    assert math.isnan(sizes.token_count)
    assert (sizes.sample_count, sizes.sequence_counts) == (4, [])


def test_the_target_length_is_that_of_the_decoder_inputs_or_labels():
    assert read_batch_sizes({"input_ids": IDS, "labels": LABELS}).target_length == 32
    assert read_batch_sizes({"input_ids": IDS, "labels": CLASSES, "decoder_input_ids": LABELS}).target_length == 32
    assert read_batch_sizes({"input_ids": IDS, "labels": CLASSES}).target_length is None


@pytest.mark.parametrize(
    ("tokens", "samples", "expected"),
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
def test_a_given_count_replaces_the_count_of_the_batch(tokens, samples, expected):
    sizes = read_batch_sizes((IMAGES, CLASSES), tokens, samples)
    assert (sizes.token_count, sizes.sample_count) == pytest.approx(expected[:2], nan_ok=True)
    assert sizes.sequence_counts == expected[2]


@pytest.mark.parametrize("tokens", [0, -1, 2.5, "many", (1, 2, 3), (0, 8), True])
def test_an_invalid_token_count_is_refused(tokens):
    with pytest.raises(UsageError, match="must be a whole number above 0"):
        read_batch_sizes(IDS, tokens)
