"""The side channel's sockets under good and bad company: the listener stays alive and hears only whom it should."""

import contextlib
import json
import os
import resource
import socket
import struct
import time
from contextlib import ExitStack

import pytest
import zmq

from kvplan.errors import DescriptionError, SessionError
from kvplan.wire.addresses import Address
from kvplan.wire.doorkeeper import admitted
from kvplan.wire.security import keyring
from kvplan.wire.side_channel import Dialer, Listener, Wakeup, limit_socket, use_key, wait

KEY = "a shared key of the cluster"


def exchange(listener, dialer, frame=b"ping", bound_s=5.0):
    """Send a frame and its echo; return what came back, or None within the bound."""
    address = Address("127.0.0.1", listener.port)
    assert dialer.send(address, frame)
    ends_at = time.monotonic() + bound_s
    while time.monotonic() < ends_at:
        wait([listener.socket, *dialer.sockets], 0.05)
        for letter in listener.receive():
            listener.send(letter.route, b"echo:" + letter.frame)
        for event in dialer.receive():
            if event.frame is not None:
                return event.frame
    return None


def is_alive(listener, key=""):
    with Dialer(key=key) as dialer:
        return exchange(listener, dialer) == b"echo:ping"


@pytest.mark.parametrize("key", ["", KEY], ids=["plain", "encrypted"])
def test_frames_go_there_and_back(key):
    with Listener(host="127.0.0.1", key=key) as listener, Dialer(key=key) as dialer:
        assert exchange(listener, dialer) == b"echo:ping"
        assert exchange(listener, dialer, b"x" * 1_000_000) == b"echo:" + b"x" * 1_000_000


@pytest.mark.parametrize("theirs", ["", "another cluster's shared key"], ids=["no key", "other key"])
def test_f12_a_stranger_is_not_heard(theirs):
    with Listener(host="127.0.0.1", key=KEY) as listener, Dialer(key=theirs) as stranger:
        assert exchange(listener, stranger, bound_s=0.6) is None
        assert is_alive(listener, KEY)


def test_f12_a_keyed_client_does_not_talk_to_a_listener_without_key():
    with Listener(host="127.0.0.1") as listener, Dialer(key=KEY) as dialer:
        assert exchange(listener, dialer, bound_s=0.6) is None
        assert is_alive(listener)


def test_f12_bytes_of_a_recorded_session_are_not_heard_again():
    with Listener(host="127.0.0.1", key=KEY) as listener, contextlib.closing(socket.socket()) as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        recorded = _record_one_session(listener, proxy)
        with socket.create_connection(("127.0.0.1", listener.port)) as replay:
            replay.sendall(recorded)
            time.sleep(0.3)
        assert listener.receive() == []
        assert is_alive(listener, KEY)


def _record_one_session(listener, proxy):
    """Return all bytes that a good client sends through a proxy to the listener."""
    recorded = b""
    with Dialer(key=KEY) as dialer:
        dialer.send(Address(*proxy.getsockname()), b"secret claim")
        inside, _ = proxy.accept()
        with inside, socket.create_connection(("127.0.0.1", listener.port)) as outside:
            inside.setblocking(False)
            outside.setblocking(False)
            letters = []
            ends_at = time.monotonic() + 5
            while not letters and time.monotonic() < ends_at:
                for here, there, keep in ((inside, outside, True), (outside, inside, False)):
                    with contextlib.suppress(BlockingIOError):
                        data = here.recv(65536)
                        recorded += data if keep else b""
                        there.sendall(data)
                letters = listener.receive()
            assert [letter.frame for letter in letters] == [b"secret claim"]
    assert b"secret claim" not in recorded
    return recorded


def test_f11_noise_on_the_raw_socket_leaves_the_listener_alive():
    with Listener(host="127.0.0.1") as listener:
        for noise in (os.urandom(1 << 20), b"\0" * (1 << 20), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10 + b"\x7f" * 1000):
            with socket.create_connection(("127.0.0.1", listener.port)) as raw, contextlib.suppress(OSError):
                raw.sendall(noise)
            listener.receive()
        assert is_alive(listener)


def test_f11_a_frame_above_the_limit_closes_only_its_connection():
    with Listener(host="127.0.0.1", max_bytes=1000) as listener, Dialer() as dialer:
        assert exchange(listener, dialer, b"x" * 2000, bound_s=0.4) is None
        assert is_alive(listener)


def test_f11_a_thousand_connections_leave_the_listener_alive():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    with Listener(host="127.0.0.1") as listener, contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        assert is_alive(listener)


def test_f11_slow_and_unfinished_handshakes_leave_the_listener_alive():
    with Listener(host="127.0.0.1") as listener, contextlib.ExitStack() as stack:
        greeting = b"\xff" + b"\0" * 8 + b"\x7f"
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", listener.port))) for _ in range(50)]
        for index, raw in enumerate(slow):
            raw.sendall(greeting[: index % len(greeting)])
        assert is_alive(listener)


def test_f11_reset_connections_leave_the_listener_alive():
    with Listener(host="127.0.0.1") as listener:
        for _ in range(50):
            raw = socket.create_connection(("127.0.0.1", listener.port))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.close()
        assert is_alive(listener)


def test_a_client_that_does_not_read_does_not_stop_others():
    with Listener(host="127.0.0.1") as listener, Dialer() as lazy:
        lazy.send(Address("127.0.0.1", listener.port), b"hello")
        route = None
        while route is None:
            wait([listener.socket], 0.1)
            route = next((letter.route for letter in listener.receive()), None)
        started = time.monotonic()
        for _ in range(20_000):
            listener.send(route, b"y" * 1000)
        assert time.monotonic() - started < 5
        assert is_alive(listener)


def test_the_dialer_says_when_a_line_goes_up_and_down():
    with Dialer() as dialer:
        with Listener(host="127.0.0.1") as listener:
            address = Address("127.0.0.1", listener.port)
            assert exchange(listener, dialer) == b"echo:ping"
        assert _line_state(dialer, address) is False


def test_the_dialer_says_when_nobody_listens():
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = Address(*free.getsockname())
    with Dialer() as dialer:
        dialer.send(address, b"anybody?")
        assert _line_state(dialer, address) is False


def _line_state(dialer, address, bound_s=3.0):
    ends_at = time.monotonic() + bound_s
    while time.monotonic() < ends_at:
        wait(dialer.sockets, 0.05)
        for event in dialer.receive():
            if event.frame is None and event.address == address and not event.is_up:
                return False
    return None


def test_a_dialer_reconnects_to_a_successor_on_the_same_port():
    with Dialer() as dialer:
        with Listener(host="127.0.0.1") as listener:
            port = listener.port
            assert exchange(listener, dialer) == b"echo:ping"
        with Listener(host="127.0.0.1", port=port) as successor:
            assert exchange(successor, dialer) == b"echo:ping"


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.1"])
def test_a_listener_open_to_strangers_needs_a_key_or_the_word_insecure(host):
    with pytest.raises(DescriptionError, match="KVPLAN_SIDE_CHANNEL_KEY"):
        Listener(host=host)


def test_a_wildcard_listener_with_a_key_or_the_word_insecure_listens():
    for options in ({"key": KEY}, {"insecure": True}):
        with Listener(host="0.0.0.0", **options) as listener:
            assert listener.port > 0


def test_a_port_that_is_taken_is_a_session_error():
    with Listener(host="127.0.0.1") as listener, pytest.raises(SessionError, match=str(listener.port)):
        Listener(host="127.0.0.1", port=listener.port)


def test_keys_are_the_same_in_every_process_and_differ_by_shared_key():
    assert keyring(KEY) == keyring(KEY)
    assert keyring(KEY).server != keyring(KEY).client
    assert keyring(KEY) != keyring(KEY + "!")
    assert keyring(KEY).server.public.decode() == "6k.h9{3N=F-:s^zmdibnRXV[Z.aa-h]vb{9mpY!j"


def test_a_wakeup_ends_a_wait_and_never_blocks():
    wakeup = Wakeup()
    for _ in range(100_000):
        wakeup.set()
    started = time.monotonic()
    wait([wakeup], 5.0)
    assert time.monotonic() - started < 1
    wakeup.clear()
    started = time.monotonic()
    wait([wakeup], 0.05)
    assert time.monotonic() - started >= 0.05
    wakeup.close()
    wakeup.set()


@pytest.mark.parametrize("key", ["", "a key that all of them know"], ids=["without-key", "with-key"])
def test_only_addresses_on_the_allow_list_get_through(key):
    """Every address of 127.0.0.0/8 is this machine's: 127.0.0.2 stands for a stranger, 127.0.0.3 for a peer."""
    rules = admitted(["127.0.0.3", "10.0.0.0/8"], "127.0.0.1")
    with Listener(host="127.0.0.1", key=key, admitted=rules) as listener, ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for last in (1, 2, 3):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            limit_socket(dealer, "127.0.0.1", 1000)
            use_key(dealer, key, "127.0.0.1")
            dealer.connect(f"tcp://127.0.0.{last}:0;127.0.0.1:{listener.port}")
            dealer.send(b"from %d" % last)
        heard, ends_at = set(), time.monotonic() + (1.5 if key else 0.7)
        while time.monotonic() < ends_at:
            wait(listener.sources, 0.05)
            heard |= {letter.frame for letter in listener.receive()}
        assert heard == {b"from 1", b"from 3"}


def test_names_on_the_allow_list_are_looked_up_and_those_without_meaning_admit_nobody(caplog):
    with Listener(host="127.0.0.1", admitted=("localhost", "no-such-host.invalid")) as listener, Dialer() as dialer:
        address = Address("127.0.0.1", listener.port)
        dialer.send(address, b"hello")
        ends_at = time.monotonic() + 5
        while not (letters := listener.receive()) and time.monotonic() < ends_at:
            wait(listener.sources, 0.05)
        assert [letter.frame for letter in letters] == [b"hello"]
    assert "no-such-host.invalid means no address here" in caplog.text


def key_files(folder, hosts):
    """One key file per host, in which all of the hosts are listed; return the keys by host."""
    pairs = {host: zmq.curve_keypair() for host in hosts}
    peers = {host: public.decode() for host, (public, _) in pairs.items()}
    keys = {}
    for host, (_, secret) in pairs.items():
        path = folder / f"{host}.json"
        path.write_text(json.dumps({"secret": secret.decode(), "peers": peers}))
        keys[host] = f"@{path}"
    return keys


def test_peers_with_key_pairs_of_their_own_are_heard_and_others_are_not(tmp_path):
    keys = key_files(tmp_path, ["127.0.0.1", "127.0.0.2"])
    (tmp_path / "other").mkdir()
    others = key_files(tmp_path / "other", ["127.0.0.1", "127.0.0.2"])
    with Listener(host="127.0.0.1", key=keys["127.0.0.1"]) as listener:
        assert is_alive(listener, keys["127.0.0.2"])
        assert is_alive(listener, keys["127.0.0.1"])
        for stranger in ("", KEY, others["127.0.0.2"]):
            with Dialer(key=stranger) as dialer:
                assert exchange(listener, dialer, bound_s=0.4) is None
        assert is_alive(listener, keys["127.0.0.2"])


def test_a_client_that_knows_the_listeners_key_and_is_not_listed_is_not_heard(tmp_path):
    """As after a machine was taken out of the others' files."""
    keys = key_files(tmp_path, ["127.0.0.1", "127.0.0.2"])
    path = tmp_path / "127.0.0.1.json"
    content = json.loads(path.read_text())
    del content["peers"]["127.0.0.2"]
    shorter = tmp_path / "shorter.json"
    shorter.write_text(json.dumps(content))
    with Listener(host="127.0.0.1", key=f"@{shorter}") as listener:
        with Dialer(key=keys["127.0.0.2"]) as dialer:
            assert exchange(listener, dialer, bound_s=0.4) is None
        assert is_alive(listener, keys["127.0.0.1"])


def test_a_listener_with_another_hosts_key_is_not_believed(tmp_path):
    keys = key_files(tmp_path, ["127.0.0.1", "127.0.0.2"])
    with Listener(host="127.0.0.1", key=keys["127.0.0.2"]) as impostor, Dialer(key=keys["127.0.0.1"]) as dialer:
        assert exchange(impostor, dialer, bound_s=0.4) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("not json", "key file"),
        ("[]", "'secret' and 'peers'"),
        ('{"secret": "short", "peers": {}}', "secret is not a key of 40"),
        ('{"secret": "' + "é" * 40 + '", "peers": {}}', "secret is not a key of 40"),
        ('{"secret": "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6", "peers": {"h": 5}}', r"peers\['h'\] is not a key"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DescriptionError, match=words) as caught:
        Listener(host="127.0.0.1", key=f"@{path}")
    assert "keys.json" in str(caught.value)
    assert "JTKVSB" not in str(caught.value)
