"""Disconnects: resumable requests continue on a new socket, and no token is lost or repeated."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import aiohttp
import pytest

from millrace.stages.testing.scripted.engine import SMALL
from tests.counts import FULL, first_seed
from tests.deploy.sockets import ENDLESS, Client, Serving, on_loop, serving, text_of, until
from tests.deploy.websocket.test_websocket_credit import PARKS_SOON, whole

ROOM = replace(SMALL, max_num_seqs=64, num_gpu_blocks=1024)


def last_of(client: Client, id: str) -> int:
    """The number of the last message received for a request."""
    return max((m["seq"] for m in client.received if m.get("id") == id and "seq" in m), default=0)


async def begin(client: Client, max_tokens: int, num_chunks: int = 0) -> str:
    """Creates request "a" and waits for the first chunks. Returns the token to resume it."""
    await client.create("a", max_tokens=max_tokens, resume=True)
    token = (await client.receive_until("created"))["token"]
    for _ in range(num_chunks):
        await client.receive_until("chunk")
    return token


async def resume(client: Client, id: str, token: str, last: int) -> None:
    await client.send("resume", id=id, token=token, last=last)
    assert (await client.receive_until("resumed", id))["last"] == last


@on_loop
async def test_a_request_goes_on_behind_the_last_message_received():
    async with serving(step_s=0.002, script=ENDLESS) as running:
        async with running.client() as first:
            token = await begin(first, max_tokens=80, num_chunks=20)
            first.cut()
        for last in (12, 20):  # unacknowledged messages can be sent again, any number of times
            async with running.client() as client:
                await resume(client, "a", token, last)
                assert (await client.receive())["seq"] == last + 1
                client.cut()
        async with running.client() as second:
            await resume(second, "a", token, 20)
            await second.receive_until("done", "a")
            chunks = first.of("a")[:20] + second.of("a")
            assert [chunk["seq"] for chunk in chunks] == list(range(1, len(chunks) + 1))
            assert text_of(chunks) == await whole(running, 80)
            await second.send("credit", id="a", last=last_of(second, "a"))
            await second.create("a", max_tokens=1)  # so the id is free
            await second.receive_until("done", "a")
        await running.check_quiet()


@on_loop
async def test_a_request_without_a_client_is_parked_and_keeps_few_messages():
    async with serving(step_s=0.001, script=ENDLESS, engine=PARKS_SOON) as running:
        async with running.client() as first:
            token = await begin(first, max_tokens=200, num_chunks=1)
            first.cut()
        scheduler, pool = running.engine.parts.schedule.scheduler, running.engine.parts.allocate.allocator.pool
        await until(lambda: scheduler.num_parked == 1)
        assert pool.num_in_use * SMALL.block_size < 100
        async with running.client() as second:
            await resume(second, "a", token, last_of(first, "a"))
            await second.receive_until("done")
            assert text_of(first.of("a") + second.of("a")) == await whole(running, 200)


@on_loop
async def test_messages_that_are_not_acknowledged_fill_the_window_and_then_it_is_parked():
    async with serving(step_s=0.002, script=ENDLESS, engine=PARKS_SOON) as running, running.client() as client:
        await client.create("a", n=8, max_tokens=100, resume=True, logprobs=0)
        await client.receive_exactly(256, "a")
        await until(lambda: running.engine.parts.schedule.scheduler.num_parked == 8)
        await client.send("credit", id="a", last=100)
        await client.receive_exactly(100, "a")
        while not client.of("a", "done"):
            await client.send("credit", id="a", last=last_of(client, "a"))
            await client.receive()
        last = last_of(client, "a")
        assert [m["seq"] for m in client.received[1:]] == list(range(1, last + 1))
        assert client.of("a", "usage")[0]["usage"]["completion_tokens"] == 8 * 100
        await client.send("credit", id="a", last=last)
        await running.check_quiet()


@on_loop
async def test_without_a_client_or_after_new_credit_no_time_without_room_counts():
    async with serving(step_s=0.001, script=ENDLESS, engine=PARKS_SOON, stalled_reader_s=600.0) as running:
        async with running.client() as first:
            await first.create("a", max_tokens=30, resume=True, credit=1)
            token = (await first.receive_until("created"))["token"]
            await first.receive_until("chunk")
            stream = running.server._sockets._streams._by_token[token]
            await until(lambda: stream._starving is not None)
            stream._note_starved()
            stream.grant(1, None)  # at the last moment
            await first.receive_until("chunk")
            await until(lambda: stream._starving is not None)
            first.cut()
        await until(lambda: stream.delivery.session is None and stream._starving is None)
        async with running.client() as second:
            await resume(second, "a", token, last_of(first, "a"))
            await second.send("credit", id="a", n=1000)
            await second.receive_until("done")


@on_loop
async def test_a_socket_that_is_still_thought_alive_gives_its_request_up():
    async with serving(step_s=0.002, script=ENDLESS) as running, running.client() as first, running.client() as second:
        token = await begin(first, max_tokens=100, num_chunks=1)
        await resume(second, "a", token, last_of(first, "a"))
        await second.receive_until("done")
        assert text_of(first.of("a") + second.of("a")).startswith(first.text("a"))
        assert text_of(
            [c for c in first.of("a") if c["seq"] < second.of("a")[0]["seq"]] + second.of("a")
        ) == await whole(running, 100)


@on_loop
async def test_an_answer_that_ended_unseen_is_there_until_its_time_is_over():
    async with serving(ws_resume_window_s=0.3) as running:
        for is_late in (False, True):
            async with running.client() as first:
                token = await begin(first, max_tokens=3)
                first.cut()
            async with running.client() as second:
                if is_late:
                    streams = running.server._sockets._streams
                    await until(lambda: not streams._by_token)  # noqa: B023
                    await second.send("resume", id="a", token=token, last=0)
                    assert (await second.receive_until("error"))["status"] == 404
                else:
                    await resume(second, "a", token, 0)
                    await second.receive_until("done")
                    assert second.text("a") == await whole(running, 3)
                    await second.send("credit", id="a", last=last_of(second, "a"))
        await running.check_quiet()


@on_loop
async def test_only_who_asked_for_it_is_waited_for_and_a_goodbye_ends_it():
    async with serving(step_s=0.005, script=ENDLESS) as running:
        for is_resumable, says_goodbye in ((False, False), (True, True)):
            async with running.client() as client:
                await client.create("a", max_tokens=400, resume=is_resumable)
                await client.receive_until("chunk")
                if says_goodbye:
                    await client.socket.close()
                else:
                    client.cut()
            await running.check_ended()


@on_loop
async def test_a_draining_server_waits_for_clients_that_come_back_and_for_no_others():
    for max_tokens in (30, 150):  # answered already, but not received; and only answered once the client is back
        async with serving(step_s=0.001, script=ENDLESS, engine=ROOM) as running:
            text = await whole(running, max_tokens)
            async with running.client() as first:
                token = await begin(first, max_tokens, num_chunks=3)
                if max_tokens == 30:
                    await until(lambda running=running: not running.server.service.live)
                first.cut()
            await until(lambda running=running: running.server._sockets._streams.has_orphans)
            draining = asyncio.create_task(running.server.drain())
            async with running.client() as second, running.client() as third:
                await third.create("b", max_tokens=1)
                assert (await third.receive_until("error", "b"))["status"] == 503
                assert not draining.done()
                await resume(second, "a", token, last_of(first, "a"))
                await second.receive_until("done", "a")
                assert text_of(first.of("a") + second.of("a")) == text
                assert await draining is True
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await running.client().__aenter__()


@on_loop
async def test_a_drain_ends_when_the_window_of_a_lost_client_is_over():
    async with serving(step_s=0.001, script=ENDLESS, ws_resume_window_s=0.2) as running:
        async with running.client() as client:
            await begin(client, 400, num_chunks=1)
            client.cut()
        assert await running.server.drain() is True


@on_loop
async def test_a_request_whose_time_is_over_is_given_up():
    async with serving(step_s=0.005, script=ENDLESS, ws_resume_window_s=0.1) as running:
        async with running.client() as client:
            await client.create("a", max_tokens=400, resume=True)
            await client.receive_until("chunk")
            client.cut()
        await running.check_ended()


@on_loop
async def test_a_client_cannot_resume_requests_of_other_clients():
    async with serving(step_s=0.002, script=ENDLESS, api_key=("one", "two")) as running:
        ours, theirs = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("one", "two"))
        async with running.client(**ours) as first, running.client(**theirs) as thief, running.client(**ours) as second:
            token = await begin(first, max_tokens=60)
            for client, id, said in ((thief, "a", token), (second, "b", token), (second, "a", token[:-1] + "~")):
                await client.send("resume", id=id, token=said, last=0)
                assert (await client.receive_until("error"))["status"] == 404
            for last, who in ((10_000, second),):
                await who.send("resume", id="a", token=token, last=last)
                assert (await who.receive_until("error"))["error"]["param"] == "last"
            await first.receive_until("done")


@on_loop
async def test_acknowledged_messages_cannot_be_sent_again():
    async with serving(step_s=0.002, script=ENDLESS) as running:
        async with running.client() as first:
            token = await begin(first, max_tokens=100, num_chunks=5)
            await first.send("credit", id="a", last=4)
            await first.receive_until("chunk")
            await first.receive_waiting(0.02)
            first.cut()
        async with running.client() as second:
            await second.send("resume", id="a", token=token, last=3)
            assert (await second.receive_until("error"))["error"]["param"] == "last"
            await resume(second, "a", token, 4)
            await second.receive_until("done")


async def read_with_cuts(running: Serving, draw: random.Random, name: str, max_tokens: int) -> str:
    """The text of a request that is disconnected again and again."""
    token, last, chunks = "", 0, []
    while True:
        async with running.client() as client:
            if token:
                await client.send("resume", id=name, token=token, last=last)
            else:
                await client.create(
                    name, prompt=name, max_tokens=max_tokens, resume=True, credit=draw.choice([None, 500])
                )
            for _ in range(draw.randint(1, 12)):
                message = await client.receive()
                assert message["type"] != "error", message
                token = message.get("token", token)
                if "seq" in message:
                    assert message["seq"] == last + 1
                    last += 1
                if message["type"] == "chunk":
                    chunks.append(message)
                if message["type"] == "done":
                    await client.send("credit", id=name, last=last)
                    return text_of(chunks)
                if last and draw.random() < 0.1:
                    await client.send("credit", id=name, last=draw.choice([last, max(0, last - 3)]))
            client.cut()


@pytest.mark.slow
@on_loop
async def test_random_cuts_lose_and_repeat_nothing():
    draw = random.Random(first_seed())
    async with serving(step_s=0.001, script=ENDLESS, engine=ROOM) as running:
        for i in range(12 if FULL else 3):
            name, max_tokens = f"r{i}", draw.randint(20, 120)
            text = await read_with_cuts(running, draw, name, max_tokens)
            body = {"prompt": name, "temperature": 0, "max_tokens": max_tokens}
            async with running.http.post(running.server.url + "/v1/completions", json=body) as response:
                assert text == (await response.json())["choices"][0]["text"]
        await running.check_quiet()
