"""A program with a link to a process in another network, whose cable is cut: ``unshare -rn python cut_network.py``."""

import asyncio
import sys
import time
from pathlib import Path

from support.waiting import PATIENCE_S

sys.path.insert(0, str(Path(__file__).parents[1]))

from processes.pipes import Owner, identity, link_of
from support.processes import process

from streamiter.engine.processes.link import connect_link, listen

NEAR, FAR, PORT = "10.9.0.1", "10.9.0.2", 7001


async def listen_there() -> None:
    """Listen, once the cable is there, until this process is killed."""
    print("begins", flush=True)
    sys.stdin.readline()
    await listen((FAR, PORT), lambda: link_of(Owner(), identity(1)))
    print("listens", flush=True)
    await asyncio.sleep(2 * PATIENCE_S)


async def run(*command: str) -> None:
    """Run a command."""
    with process(command, limit_s=PATIENCE_S) as started:
        assert await asyncio.to_thread(started.wait) == 0, command


async def ends(link_sends: bool, is_cut: asyncio.Event, is_open: asyncio.Semaphore) -> str:
    """Return what a link says after the cut, and when."""
    owner = Owner()
    link = link_of(owner, identity(0))
    await connect_link((FAR, PORT), link)
    await owner.is_open.wait()
    is_open.release()
    await is_cut.wait()
    cut_s = time.monotonic()
    if link_sends:
        link.send_message(["lost"])
    await owner.has_ended.wait()
    return f"{time.monotonic() - cut_s:.1f} {owner.ends[0]}"


async def main() -> None:
    """Make the networks, cut the cable, and print how a silent link ends, and one that sends."""
    program = ["unshare", "-n", sys.executable, __file__, "there"]
    with process(program, limit_s=2 * PATIENCE_S, text=True, stdin=-1, stdout=-1) as there:
        await asyncio.to_thread(there.stdout.readline)
        inside = ["nsenter", "-t", str(there.pid), "-n", "ip"]
        await run(*["ip", "link", "add", "name", "near", "type", "veth", "peer", "name", "far"])
        await run(*f"ip link set dev far netns {there.pid}".split())
        await run(*f"ip addr add {NEAR}/24 dev near".split())
        await run(*["ip", "link", "set", "dev", "near", "up"])
        await run(*inside, *f"addr add {FAR}/24 dev far".split())
        await run(*inside, *["link", "set", "dev", "far", "up"])
        there.stdin.write("\n")
        there.stdin.flush()
        await asyncio.to_thread(there.stdout.readline)
        is_cut, is_open = asyncio.Event(), asyncio.Semaphore(0)
        links = [asyncio.create_task(ends(sends, is_cut, is_open)) for sends in (False, True)]
        for _ in links:
            await asyncio.wait_for(is_open.acquire(), PATIENCE_S)
        await run(*inside, *["link", "set", "dev", "far", "down"])
        is_cut.set()
        for line in await asyncio.wait_for(asyncio.gather(*links), PATIENCE_S):
            print(line, flush=True)
        there.kill()


if __name__ == "__main__":
    asyncio.run(listen_there() if sys.argv[1:] else main())
