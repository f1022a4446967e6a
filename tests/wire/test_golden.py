"""Golden frames: what version 1 looks like on the wire, so that a change of it cannot go unnoticed.

Each file holds one message as JSON and its frame as hexadecimal digits. They were written by this package's encoder
(``python -m tests.wire.test_golden`` writes those that are missing) and read over by a person; a file is never
rewritten: a new field with a default makes a new file, anything else a new protocol version.
"""

import json
from pathlib import Path

import msgspec
import pytest

from kvplan.wire.codec import decode, encode
from kvplan.wire.messages import Message
from tests.wire.samples import MESSAGES

FOLDER = Path(__file__).parent.parent / "golden" / "wire"
FILES = sorted(FOLDER.glob("*.json"))


def test_every_message_has_a_golden_file():
    assert {file.stem for file in FILES} >= set(MESSAGES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_golden_frames_still_decode(file):
    golden = json.loads(file.read_text())
    expected = msgspec.convert(golden["message"], Message, strict=True)
    assert decode(bytes.fromhex(golden["frame"])) == expected


@pytest.mark.parametrize("name", MESSAGES)
def test_samples_still_encode_to_their_golden_frames(name):
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    assert encode(MESSAGES[name]).hex() == golden["frame"]


def write_missing():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, message in MESSAGES.items():
        file = FOLDER / f"{name}.json"
        if not file.exists():
            golden = {"message": json.loads(msgspec.json.encode(message)), "frame": encode(message).hex()}
            file.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    write_missing()
