"""What clients send, put into one form: messages in OpenAI's chat shape with flat text, and OpenAI function tools.

Pure functions of a body. They take what they can read and report the rest, so that a server may refuse what it must and
a replay of recorded traffic may go on.
"""
