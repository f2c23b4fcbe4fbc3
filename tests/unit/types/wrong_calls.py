"""Calls that a type checker must reject: every line that ends in `# wrong` or `# wrong option`, and no other."""

import omniq


def plain(a: int, *, b: str = "") -> float:
    return a / len(b)


async def plain_async(a: int) -> str:
    return str(a)


@omniq.task
def bare(a: int, b: str = "") -> float:
    return a / len(b)


@omniq.task(name="named", queue="mail")
async def named(a: int, *, queue: str) -> None: ...


async def on_the_async_class(oq: omniq.AsyncOmniQ) -> None:
    await bare.enqueue(oq)  # wrong
    await bare.enqueue(oq, "text")  # wrong
    await bare.enqueue(oq, 1, c=2)  # wrong
    await bare.enqueue(oq, 1, "x", 3)  # wrong
    await bare.enqueue(oq, 1, eta=5)  # wrong
    await named.enqueue(oq, 1)  # wrong
    await oq.options(queue="mail").enqueue(plain)  # wrong
    await oq.options(queue="mail").enqueue(plain, "text")  # wrong
    await oq.options(queue="mail").enqueue(plain, 1, b=2)  # wrong
    await oq.options(queue="mail").enqueue(plain_async, 1, 2)  # wrong
    await oq.options().enqueue(named, 1)  # wrong
    await bare.enqueue(oq.options(), "text")  # wrong
    await oq.enqueue(5)  # wrong
    await oq.get_result(5)  # wrong
    await oq.options(retries=5).enqueue(plain, 1)  # wrong option
    await oq.options(max_retries="five").enqueue(plain, 1)  # wrong option


def on_the_blocking_class(oq: omniq.OmniQ) -> None:
    bare.enqueue(oq)  # wrong
    bare.enqueue(oq, "text")  # wrong
    named.enqueue(oq, 1)  # wrong
    oq.options(queue="mail").enqueue(plain, "text")  # wrong
    oq.options(queue="mail").enqueue(plain, 1, c=1)  # wrong
    bare.enqueue(oq.options(), "text")  # wrong
    oq.options(retries=5)  # wrong option


def calling_a_task_calls_its_function() -> None:
    bare("text")  # wrong


@omniq.task(retries=5)  # wrong option
def with_an_unknown_option() -> None: ...
