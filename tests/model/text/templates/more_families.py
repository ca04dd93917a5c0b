"""More chat templates with the constructs of families: system turns by default, refused or merged, and other tools."""

from __future__ import annotations

SYSTEM_PROMPT_TOKENS = """\
{%- set default_system_message = "You are a model. Today is " + strftime_now("%Y") + "." %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{%- set system_message = messages[0]['content'] %}
    {%- else %}{%- set system_message = messages[0]['content'][0]['text'] %}{%- endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = default_system_message %}{%- set loop_messages = messages %}{%- endif %}
{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}
{%- if tools is defined and tools is not none and tools | length > 0 %}
    {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}{{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}
                {%- else %}{{- raise_exception('Only text and image blocks are supported in message content!') }}
                {%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string %}{{- message['content'] }}{%- endif %}
        {%- for call in message['tool_calls'] or [] %}
            {%- set arguments = call['function']['arguments'] %}
            {%- if arguments is not string %}{%- set arguments = arguments | tojson | safe %}{%- endif %}
            {{- '[TOOL_CALLS]' + call['function']['name'] + '[ARGS]' + arguments }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}{{- '[TOOL_RESULTS]' + message['content'] | string + '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user, system, assistant and tool roles are supported!') }}{%- endif %}
{%- endfor %}"""

TURN_TOKENS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% elif false == true %}{% set loop_messages = messages %}\
{% set system_message = 'You are a model.' %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% if system_message != false %}\
{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}\
{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% set content = message['content'] %}{% if message['role'] == 'user' %}\
{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}\
{% elif message['role'] == 'assistant' %}\
{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

ACTIONS = """\
{%- macro document_turn(documents) -%}
<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[
{%- for doc in documents %}{"document_id": {{ loop.index0 }}, "content": {{ doc | tojson }}}{% if not loop.last %},
{% endif %}{%- endfor -%}]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>
{%- endmacro -%}
{%- set tool_index = namespace(value=0) -%}{%- set regen = namespace(has_called=false) -%}
{{ bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Rules
{%- if tools %}
{% for tool in tools %}{"name": {{ tool['function']['name'] | tojson }}, "parameters": \
{{ tool['function']['parameters'] | tojson }}}{% if not loop.last %},
{% endif %}{% endfor %}
{%- endif %}
{%- if messages and messages[0]['role'] | lower == 'system' %}
{{ messages[0]['content'] }}{% set initial_instruction = true %}
{%- endif -%}<|END_OF_TURN_TOKEN|>
{%- for message in messages %}
    {%- if message.role | lower == 'system' and not (loop.first and initial_instruction) -%}
<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ message.content }}<|END_OF_TURN_TOKEN|>
    {%- elif message.role | lower == 'user' -%}
<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ message.content }}<|END_OF_TURN_TOKEN|>{%- if documents and not \
regen.has_called -%}{{ document_turn(documents) }}{%- set regen.has_called = true -%}{%- endif -%}
    {%- elif message.role | lower == 'assistant' or message.role | lower == 'chatbot' -%}
<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if message.tool_calls %}<|START_ACTION|>[
{% for call in message.tool_calls %}{"tool_call_id": "{{ tool_index.value }}", "tool_name": {{ \
call['function']['name'] | tojson }}, "parameters": {{ call['function']['arguments'] | tojson }}}\
{% if not loop.last %},{% endif %}{% set tool_index.value = tool_index.value + 1 %}
{% endfor %}]<|END_ACTION|>{% endif %}{{ message.content if message.content }}<|END_OF_TURN_TOKEN|>
    {%- elif message.role | lower == 'tool' -%}
<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ message.content | tojson }}<|END_TOOL_RESULT|>\
<|END_OF_TURN_TOKEN|>
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{%- endif -%}"""

END_OF_TEXT_TURNS = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}\
{{ '<|system|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'user' %}\
{{ '<|user|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}\
{{ '<|assistant|>\\n' + message['content'] + eos_token + '\\n' }}{% else %}\
{{ '<|assistant|>\\n' + message['content'] + eos_token }}{% endif %}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""

FUNCTIONS = """\
{%- set has_system = messages | selectattr('role', 'equalto', 'system') | list | length > 0 -%}
{%- if not has_system -%}{{ '<|im_start|>system\\nYou are a helpful model. ' }}
{%- if tools is none or (tools | length) == 0 -%}
{{ 'You do not have access to functions. <functions></functions><|im_end|>\\n' }}
{%- else -%}{{ '<functions>' + (tools | tojson) + '</functions><|im_end|>\\n' }}{%- endif -%}{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {{ '<|im_start|>system\\n' + message['content'] }}
        {%- if tools is not none -%}{{ ' <functions>' + (tools | tojson) + '</functions>' }}
        {%- elif message.get('functions', none) is not none -%}
            {{ ' <functions>' + message['functions'] + '</functions>' }}
        {%- endif -%}{{ '<|im_end|>\\n' }}
    {%- elif message['role'] == 'user' -%}{{ '<|im_start|>user\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- elif message['role'] == 'assistant' -%}
        {{ '<|im_start|>assistant\\n' }}
        {%- if message.get('content', none) is not none -%}{{ message['content'] }}{%- endif -%}
        {%- if message.get('tool_calls', none) is not none -%}
            {{ '<function_calls>' }}
            {%- for call in message['tool_calls'] -%}
                {%- if not loop.first -%}{{ '\\n' }}{%- endif -%}{{ call['function']['name'] + '(' }}
                {%- for key, value in call['function']['arguments'].items() -%}
                    {{ key + '=' + (value | tojson) }}{%- if not loop.last -%}{{ ', ' }}{%- endif -%}
                {%- endfor -%}{{ ')' }}
            {%- endfor -%}{{ '</function_calls>' }}
        {%- endif -%}
        {%- if not loop.last -%}{{ '<|im_end|>\\n' }}{%- else -%}{{ eos_token }}{%- endif -%}
    {%- elif message['role'] == 'environment' or message['role'] == 'tool' -%}
        {{ '<|im_start|>environment\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- endif -%}
    {%- if loop.last and add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
{%- endfor -%}"""

THINK_SWITCH = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- if messages[0].role == "system" -%}
    {%- set system_message = messages[0].content -%}
    {%- if "/no_think" in system_message -%}{%- set reasoning_mode = "/no_think" -%}
    {%- elif "/think" in system_message -%}{%- set reasoning_mode = "/think" -%}{%- endif -%}
    {%- set custom_instructions = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- if reasoning_mode is not defined -%}
    {%- set reasoning_mode = "/think" if enable_thinking else "/no_think" -%}
{%- endif -%}
{%- set today = strftime_now("%Y") -%}
{{- "<|im_start|>system\\n## Metadata\\n\\n" -}}
{{- "Today Date: " ~ today ~ "\\nReasoning Mode: " + reasoning_mode + "\\n\\n" -}}
{%- if custom_instructions -%}{{- custom_instructions + "\\n\\n" -}}{%- endif -%}
{%- if xml_tools or python_tools or tools -%}
    {{- "### Tools\\n\\n" -}}
    {%- if tools -%}{%- set xml_tools = tools -%}{%- endif -%}
    {%- set ns = namespace(text="You may call these:\\n<tools>\\n") -%}
    {%- for tool in xml_tools -%}{%- set ns.text = ns.text ~ (tool | string) ~ "\\n" -%}{%- endfor -%}
    {{- ns.text + "</tools>\\n" -}}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}{{ "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}{{ "<|im_start|>" + "user\\n" + content + "<|im_end|>\\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\\n" }}
    {%- else -%}{{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" }}{%- endif -%}
{%- endif -%}"""

SEPARATORS = """\
{% for message in messages %}{% if (message['role'] == 'system') %}\
{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}\
{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}\
{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

METADATA = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
    {%- set function = tool.function if tool.get("function") else tool %}

## {{ function.name }}

{{ function | tojson(indent=4, ensure_ascii=False) }}
Write the arguments as JSON.
{%- endfor %}
{%- endif -%}
{%- for msg in messages %}{%- if msg.role == 'system' %}
<|system|>
{{ msg.content }}{%- endif %}{%- endfor %}
{%- for message in messages if message.role != 'system' %}
    {%- set role = message['role'] %}{%- set content = message['content'] %}
    {%- set visible = content.split('</think>')[-1].strip() if content is string else content %}
    {%- set meta = message.get("metadata", "") %}
    {%- if role == 'user' %}<|user|>
{{ visible }}
    {%- elif role == 'assistant' and not meta %}<|assistant|>
{{ visible }}
    {%- elif role == 'assistant' and meta %}<|assistant|>{{ meta }}
{{ visible }}
    {%- elif role == 'observation' or role == 'tool' %}<|observation|>
{{ visible }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

ROLE_TABLE = """\
{%- set role_indicators = {'user': '[|user|]\\n', 'assistant': '[|assistant|]\\n', 'system': '[|system|]\\n',
    'tool': '[|tool|]\\n'} %}
{%- set end_of_turn = '[|endofturn|]\\n' %}
{%- macro available_tools(tools) %}
    {{- "# Available Tools" + "\\n" }}
    {%- for tool in tools %}
        {{- "<tool>" }}{{- tool.function | tojson(ensure_ascii=False) }}{{- "</tool>\\n" }}
    {%- endfor %}
{%- endmacro %}
{%- set ns = namespace(last_query_index=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last_query_index = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for i in range(messages | length) %}
    {%- set msg = messages[i] %}{%- set role = msg.role %}
    {%- if role not in role_indicators %}{{- raise_exception('Unknown role: ' ~ role) }}{%- endif %}
    {%- if i == 0 %}
        {%- if role == 'system' %}
            {{- role_indicators['system'] }}{{- msg.content }}
            {%- if tools is defined and tools %}{{- "\\n\\n" }}{{- available_tools(tools) }}{%- endif %}
            {{- end_of_turn }}{%- continue %}
        {%- elif tools is defined and tools %}
            {{- role_indicators['system'] }}{{- available_tools(tools) }}{{- end_of_turn }}
        {%- endif %}
    {%- endif %}
    {%- if role == 'assistant' %}
        {{- role_indicators['assistant'] }}
        {%- if msg.content %}
            {%- if "</think>" in msg.content %}
                {%- set content = msg.content.split('</think>')[-1].strip() %}
                {%- set thought = msg.content.split('</think>')[0].strip() %}
                {%- if thought.startswith("<think>") %}{%- set thought = thought[7:].strip() %}{%- endif %}
            {%- else %}{%- set content = msg.content %}{%- endif %}
            {%- if thought and i > ns.last_query_index %}{{- "<think>\\n" ~ thought ~ "\\n</think>\\n\\n" }}{%- endif %}
            {{- content }}
        {%- endif %}
        {%- for call in msg.tool_calls or [] %}
            {{- "<tool_call>" ~ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
            {{- "</tool_call>" }}
        {%- endfor %}
        {{- end_of_turn }}
    {%- elif role == "tool" %}
        {%- if i == 0 or messages[i - 1].role != "tool" %}{{- role_indicators['tool'] }}{%- endif %}
        {{- "<tool_result>" ~ ({"result": msg.content} | tojson) ~ "</tool_result>" }}
        {%- if loop.last or messages[i + 1].role != "tool" %}{{- end_of_turn }}{%- else %}{{- "\\n" }}{%- endif %}
    {%- else %}{{- role_indicators[role] }}{{- msg.content }}{{- end_of_turn }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- role_indicators['assistant'] }}
    {%- if enable_thinking is defined and enable_thinking is true %}{{- "<think>\\n" }}
    {%- else %}{{- "<think>\\n\\n</think>\\n\\n" }}{%- endif %}
{%- endif %}"""

BUDGET = """\
{%- set budgets = {0: 0, 512: 128, 1024: 256} -%}
{%- set ns = namespace(interval=none) -%}
{%- if thinking_budget is not defined -%}{%- set thinking_budget = -1 -%}{%- endif -%}
{%- for k, v in budgets | dictsort -%}
    {%- if ns.interval is none and thinking_budget <= k -%}{%- set ns.interval = v -%}{%- endif -%}
{%- endfor -%}
{%- macro py_type(t) -%}
    {%- if t == "string" -%}str{%- elif t in ("number", "integer") -%}int{%- elif t == "array" -%}list
    {%- else -%}Any{%- endif -%}
{%- endmacro -%}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if tools is iterable and tools | length > 0 %}
    {{- bos_token + "system\\n" }}
    {%- for item in tools if item.type == "function" %}
        {%- set params = item.function.parameters.properties or {} %}
        {%- set required = item.function.parameters.required or [] %}
        {{- "def " ~ item.function.name ~ "(" }}
        {%- for name, spec in params.items() if name in required %}
            {{- name ~ ": " ~ py_type(spec.type) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}{{- "):\\n    " ~ item.function.description ~ "\\n" }}
    {%- endfor %}
    {{- (system_message ~ "\\n" if system_message is defined) ~ eos_token }}
{%- elif system_message is defined %}{{- bos_token + "system\\n" + system_message + eos_token }}{%- endif %}
{%- if ns.interval is not none and thinking_budget != -1 %}
    {{- bos_token + "system\\nReflect every " ~ ns.interval ~ " tokens." + eos_token }}
{%- endif %}
{%- for message in loop_messages %}
    {%- if message.role == "assistant" %}
        {{- bos_token + message.role }}
        {%- if message.reasoning_content is defined and message.reasoning_content is string %}
            {{- "\\n<think>" + message.reasoning_content | trim + "</think>" }}
        {%- endif %}
        {%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}
            {{- "\\n" + message.content | trim + "\\n" }}
        {%- endif %}
        {%- for call in message.tool_calls if message.tool_calls %}
            {{- "\\n<call><function=" + call.function.name + ">\\n" }}
            {%- for name, value in call.function.arguments | items %}
                {{- "<parameter=" + name + ">" ~ value ~ "</parameter>\\n" }}
            {%- endfor %}{{- "</function></call>" }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}{{- bos_token + message.role + "\\n" + message.content | string + eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- bos_token + "assistant\\n" }}{%- endif %}"""

MORE_FAMILIES = {
    "system prompt tokens": SYSTEM_PROMPT_TOKENS,
    "turn tokens": TURN_TOKENS,
    "actions": ACTIONS,
    "end of text turns": END_OF_TEXT_TURNS,
    "functions": FUNCTIONS,
    "think switch": THINK_SWITCH,
    "separators": SEPARATORS,
    "metadata": METADATA,
    "role table": ROLE_TABLE,
    "budget": BUDGET,
}
