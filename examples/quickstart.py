"""The smallest whole program: enqueue, run a worker beside it, fetch results."""

from omniq import OmniQ, SQLiteStorage


def add(a: int, b: int) -> int:
    return a + b


def main() -> None:
    with OmniQ(SQLiteStorage("quickstart.db")) as oq:
        one = oq.enqueue(add, 2, 3)
        many = oq.enqueue_many(add, [(n, n) for n in range(5)])

        with oq.worker(concurrency=4):
            result = oq.get_result(one, wait=True, timeout=10)
            print("2 + 3 =", result.result)
            print("doubles:", [oq.get_result(i, wait=True, timeout=10).result for i in many])


if __name__ == "__main__":
    main()
