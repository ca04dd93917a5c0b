"""Credit: a stream without credit gets no chunks and takes no blocks; others are not affected."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

from millrace.stages.testing.scripted.engine import SMALL
from tests.deploy.sockets import ENDLESS, on_loop, serving, until

PARKS_SOON = replace(SMALL, max_unread_tokens=8)


@on_loop
async def test_credit_counts_chunks():
    async with serving(step_s=0.002, script=ENDLESS) as running, running.client() as client:
        await client.create("a", max_tokens=60, credit=3)
        await client.receive_exactly(3, "a")
        await client.send("credit", id="a", n=2)
        await client.receive_exactly(2, "a")
        await client.send("credit", id="a", n=100)
        await client.receive_until("done")
        assert client.text("a") == await whole(running, 60)


@on_loop
async def test_without_credit_nothing_comes_but_the_end_of_what_is_refused():
    async with serving() as running, running.client() as client:
        await client.create("a", max_tokens=3, credit=0)
        await client.create("b", prompt="b" * 600, credit=0)
        await client.receive_until("error", "b")
        assert {message["type"] for message in await client.receive_waiting()} <= {"created"}
        await client.send("credit", id="a", n=9)
        await client.receive_until("done", "a")


@on_loop
async def test_a_stream_without_credit_is_parked_and_its_cache_does_not_grow():
    async with serving(step_s=0.001, script=ENDLESS, engine=PARKS_SOON) as running, running.client() as client:
        parts = running.engine.parts
        await client.create("a", max_tokens=250, credit=2)
        await until(lambda: parts.schedule.scheduler.num_parked == 1)
        await client.receive_exactly(2, "a")
        num_blocks, num_steps = parts.allocate.allocator.pool.num_in_use, running.engine.model.num_steps
        await client.create("b", prompt="b", max_tokens=100)
        await client.receive_until("done", "b")
        await until(lambda: parts.allocate.allocator.pool.num_in_use <= num_blocks)
        assert running.engine.model.num_steps > num_steps + 90
        assert len(client.of("a")) == 2 and len(client.text("b")) == 100
        assert num_blocks * SMALL.block_size < 60  # of the 250 requested tokens
        await client.send("credit", id="a", n=1000)
        await client.receive_until("done", "a")
        assert client.text("a") == await whole(running, 250)


@on_loop
async def test_who_grants_no_credit_in_time_loses_the_request_and_not_the_socket():
    for limits in ({"stalled_reader_s": 0.2}, {}):  # the server's limit, and the engine's
        engine = replace(PARKS_SOON, max_parked_s=60.0 if limits else 0.2)
        async with serving(step_s=0.001, script=ENDLESS, engine=engine, **limits) as running:
            async with running.client() as client:
                await client.create("a", max_tokens=250, credit=1)
                error = await client.receive_until("error", "a")
                assert (error["error"]["code"], error["status"]) == ("stalled_reader", 408)
                assert error["seq"] == 2 and len(client.of("a")) == 1
                await client.create("a", max_tokens=2)
                await client.receive_until("done", "a")
                await running.check_quiet()


@on_loop
async def test_a_finished_answer_waits_for_credit_no_longer_than_another():
    async with serving(stalled_reader_s=0.2) as running, running.client() as client:
        await client.create("a", max_tokens=3, credit=0)
        assert (await client.receive_until("error", "a"))["error"]["code"] == "stalled_reader"
        await running.check_quiet()


@on_loop
async def test_cancel_needs_no_credit():
    async with serving(step_s=0.001, script=ENDLESS, engine=PARKS_SOON) as running, running.client() as client:
        await client.create("a", max_tokens=250, credit=0)
        await until(lambda: running.engine.parts.schedule.scheduler.num_parked == 1)
        await client.send("cancel", id="a")
        assert (await client.receive_until("done"))["reason"] == "cancel"
        await running.check_quiet()


@on_loop
async def test_a_socket_that_is_not_read_is_cut_off():
    """The answers are about 4 MB, more than all buffers hold."""
    async with serving(script=ENDLESS, stalled_reader_s=0.3) as running, running.client() as client:
        connection = client.socket._response.connection
        assert connection is not None and connection.transport is not None
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.transport.pause_reading()
        await client.create("a", n=8, max_tokens=450, logprobs=20)
        await until(lambda: running.server.service.live)
        await running.check_quiet()
        assert running.server.metrics._aborted["stalled_reader"] == 1
        client.cut()


@on_loop
async def test_choices_share_the_credit_of_their_request():
    async with serving(step_s=0.002) as running, running.client() as client:
        await client.create("a", n=4, max_tokens=5, ignore_eos=True, credit=3)
        await client.receive_exactly(3, "a")
        await client.send("credit", id="a", n=100)
        await client.receive_until("done")
        found = [
            "".join(c["text"] for m in client.of("a") for c in m["body"]["choices"] if c["index"] == i)
            for i in range(4)
        ]
        assert [len(text.encode()) for text in found] == [5, 5, 5, 5]


@on_loop
async def test_a_hundred_streams_without_credit_delay_no_other_request():
    small = replace(PARKS_SOON, max_num_seqs=128, num_gpu_blocks=1024)
    async with serving(step_s=0.001, script=ENDLESS, engine=small) as running, running.client() as client:
        for i in range(100):
            await client.create(f"s{i}", prompt=f"s{i}", max_tokens=300, credit=1)
        await until(lambda: running.engine.parts.schedule.scheduler.num_parked == 100)
        await client.create("b", max_tokens=50)
        await client.receive_until("done", "b")
        assert sum(len(client.of(f"s{i}")) for i in range(100)) == 100
        num_tasks = len(asyncio.all_tasks())
    assert num_tasks < 100 + 60


async def whole(running, max_tokens: int) -> str:
    """The same answer over HTTP."""
    body = {"prompt": "a", "temperature": 0, "max_tokens": max_tokens}
    async with running.http.post(running.server.url + "/v1/completions", json=body) as response:
        return (await response.json())["choices"][0]["text"]
