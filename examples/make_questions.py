"""Writes examples/questions.parquet, the demo's input: 24 questions of our own.

Run: python -m examples.make_questions
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

TARGET = Path(__file__).parent / "questions.parquet"

QUESTIONS: dict[str, list[str]] = {
    "practical": [
        "How do I keep a houseplant alive while I am away for three weeks?",
        "What should I check before I buy a used bicycle?",
        "Give me five ways to cook with leftover rice.",
        "How can I sleep better in a hot room without air conditioning?",
        "What belongs in a small first-aid kit for a day hike?",
        "How do I remove a stripped screw from a wooden board?",
    ],
    "knowledge": [
        "Why is the sea salty but most lakes are not?",
        "What are the main differences between a virus and a bacterium?",
        "How does a suspension bridge carry its load?",
        "Why do leaves change colour in autumn?",
        "What made the printing press so important in Europe?",
        "How do noise-cancelling headphones work?",
    ],
    "writing": [
        "Write a short note to a neighbour who plays the drums late at night.",
        "Describe a railway station at dawn in one paragraph.",
        "Write a polite email that asks to move a meeting to Thursday.",
        "Invent a slogan for a library that lends tools.",
        "Write a four-line poem about an unread message.",
        "Summarise the story of Noah's Ark in three sentences.",
    ],
    "reasoning": [
        "If a train leaves at 14:50 and the journey takes 2 hours and 25 minutes, when does it arrive?",
        "A recipe for 4 people needs 300 grams of flour. How much is needed for 6 people?",
        "Is a tomato a fruit or a vegetable? Explain both answers.",
        "Which weighs more, a kilogram of feathers or a kilogram of iron, and why do people get it wrong?",
        "Name three reasons why a shop might sell an item below its cost.",
        "What would happen to the tides if the Moon were twice as far away?",
    ],
}


def main() -> None:
    rows = [
        {"id": f"q{number:02d}", "category": category, "prompt": question}
        for number, (category, question) in enumerate(
            ((category, question) for category, questions in QUESTIONS.items() for question in questions), start=1
        )
    ]
    schema = pa.schema([("id", pa.string()), ("category", pa.string()), ("prompt", pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), TARGET, write_statistics=False)
    print(f"{len(rows)} questions in {TARGET}")


if __name__ == "__main__":
    main()
