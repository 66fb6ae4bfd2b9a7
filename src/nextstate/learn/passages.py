"""Short plain texts on which a version's perplexity is compared with the base's.

They stand for all that the policy could do before it learned anything and that nobody asks for while it learns: prose,
facts, sums, code, a letter, a list. What they say does not matter; that they never change does.
"""

PASSAGES = (
    "The river is low in August, and children walk across it on the stones.",
    "Water boils at a lower temperature on a mountain, because the air there presses on it less.",
    "She put the letter back into its envelope, looked at the clock, and went out without her coat.",
    "Twelve eggs make a dozen. Three dozen eggs are thirty-six, and half of those are eighteen.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 4))",
    "The train to the coast leaves at half past nine from platform two. Tickets are sold on board.",
    "A contract is an agreement between two or more parties that a court will enforce.",
    "Dear Ms. Alder, thank you for your order. It was sent this morning and should reach you on Friday.",
    "Leaves are green because they hold chlorophyll, which takes in red and blue light.",
    "First wash the rice until the water runs clear. Then cook it in twice its volume of water.",
    '{"name": "lamp", "price": 24.5, "colors": ["white", "black"], "in_stock": true}',
    "The museum is closed on Mondays. On other days it opens at ten and closes at six.",
    "If all cats are animals, and no stone is an animal, then no stone is a cat.",
    "In winter the lake freezes from the edges inwards, and the ducks gather in the middle.",
    "for name in names:\n    if name.startswith('A'):\n        count += 1",
    "The heart pumps blood through the lungs, where it takes up oxygen, and then around the body.",
    "He asked whether anyone had seen his dog. Nobody had, but an old man offered to help him look.",
    "Buy milk, bread and apples. Call the plumber. Return the books to the library by Thursday.",
    "The moon goes around the earth in about twenty-seven days, and always shows it the same side.",
    "To leave a voice message, speak after the tone. When you have finished, you may hang up.",
)
