"""A small pipeline: parts that run side by side, a step that waits for them, and a follow-up that cannot get lost.

`blocked_by` holds the summary back until all parts have succeeded. The summary enqueues its mail in
`current_task().transaction()`: the mail is stored together with the summary's own success, or not at all.
"""

import omniq
from omniq import OmniQ, SQLiteStorage, current_task


@omniq.task(name="count-words")
def count_words(text: str) -> int:
    return len(text.split())


@omniq.task(name="summarise")
def summarise(part_ids: list[str]) -> int:
    with OmniQ(SQLiteStorage("pipeline.db")) as oq:
        total = sum(oq.get_result(part).result for part in part_ids)
    with current_task().transaction() as tx:
        tx.options(task_id=f"mail-for-{current_task().id}").enqueue(mail, total)
    return total


@omniq.task(name="mail")
def mail(total: int) -> str:
    return f"The texts have {total} words."


def main() -> None:
    texts = ["one two three", "four five", "six seven eight nine"]
    with OmniQ(SQLiteStorage("pipeline.db")) as oq:
        with oq.transaction() as tx:  # all four tasks are stored, or none
            parts = [tx.enqueue(count_words, text) for text in texts]
            summary = tx.options(blocked_by=parts).enqueue(summarise, parts)

        with oq.worker(concurrency=4) as pool:
            pool.drain()

        print("words:", oq.get_result(summary).result)
        print("mail: ", oq.get_result(f"mail-for-{summary}").result)


if __name__ == "__main__":
    main()
