"""Chat templates that treat tools and reasoning the way well-known models do, and say little else."""

# Knows no tools, and speaks first where nobody else does; SmolLM2.
CHATML = """\
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_HERMES_SYSTEM = """\
{% if tools %}
{{ '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'Be helpful.') }}
{{- '\\n\\nTools:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nCall them with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
"""

_HERMES_RESULT = """\
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
"""

# Writes a call's arguments as JSON whatever they are; text comes out as a JSON string. Qwen2.5.
QWEN25 = (
    _HERMES_SYSTEM
    + """\
{%- for message in messages %}
{%- if message.role == 'tool' -%}"""
    + _HERMES_RESULT
    + """\
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + ('\\n' + message.content if message.content or not message.tool_calls else '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)

# Takes arguments either way, strips the reasoning of answers before the last question, and opens the next. Qwen3.
QWEN3 = (
    _HERMES_SYSTEM
    + """\
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' -%}"""
    + _HERMES_RESULT
    + """\
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > last.question %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
)

# Shows tools with the first question, takes one call a message, writes results for "ipython". Llama 3.1.
LLAMA31 = """\
{%- macro header(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- header('assistant') + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- header('ipython') + (message.content | tojson) + '<|eot_id|>' }}
{%- else %}
{{- header(message.role) }}
{%- if tools and message.role == 'user' and (loop.first or loop.previtem.role == 'system') %}
{{- 'Call functions with {"name": ..., "parameters": ...}.\\n\\n' }}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
{%- endif %}
{{- message.content + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""

# Puts the arguments into text as they are, so they must be text. DeepSeek's way.
TEXT_ARGUMENTS = """\
{%- for tool in tools or [] %}{{ '[tool]' + (tool | tojson) + '\\n' }}{% endfor %}
{%- for message in messages %}
{{- '[' + message.role + ']' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '[call]' + call.function.name + ':' + call.function.arguments + '[end]' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

# The same without a check of types: an object comes out as Python writes it.
CARELESS = TEXT_ARGUMENTS.replace("+ call.function.arguments +", "~ call.function.arguments ~")
