# ruff: noqa: E501  (lists of words)
"""What can be read off a user's reply without a model: cue words in some languages, form, likeness to the request.

Each cue is one number between 0 and 1. None decides anything: a head (see `head`) learns what they are worth, beside
what the judge model makes of the same reply. That is what keeps a cue honest: 'thanks' counts for good only as far as
labelled replies say so.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from zlib import crc32

CUES: dict[str, str] = {
    "no_first": r"^\W*(?:no|nope|nah|nein|non|nee|não|nie|нет|不|违|いいえ|違|아니|hayır|لا|nej|ne)\b|^不|^違|^아니",
    "yes_first": r"^\W*(?:yes|yeah|yep|yup|sure|ja|jawohl|oui|sí|si|sim|tak|да|はい|네|evet|нав|так|jo|ok(?:ay)?,? (?:do|go|please|yes))\b"
    r"|^(?:是|好的|对|はい|네)",
    "ack_first": r"^\W*(?:ok(?:ay)?|k|alright|all right|fine|hm+|mhm|i see|aha|so|well|understood|noted|d'accord|bien)\b",
    "ack_only": r"^\W*(?:ok(?:ay)?|k|kk|alright|all right|fine|h+m+|mhm|uh-?huh|i see|aha|ah|oh|noted|understood|roger|"
    r"d'accord|vale|va bene|понятно|嗯|なるほど|tamam|gut|verstehe|dobrze|maybe|perhaps)\W*$",
    "thanks": r"\b(?:thanks?|thank you|thx|ty|tysm|cheers|appreciate|danke|dankeschön|merci|gracias|grazie|obrigad[oa]|"
    r"dank je|bedankt|dzięki|dziękuję|спасибо|дякую|teşekkür\w*|tack|takk|tak|díky|cảm ơn|terima kasih|makasih|kiitos)\b"
    r"|谢谢|多谢|感谢|ありがと|助かり|감사|고마|شكرا|धन्यवाद|शुक्रिया|🙏",
    "thanks_ahead": r"thank(?:s| you)[^.!?\n]{0,20}\b(?:in advance|ahead)\b|many thanks\W*$|im voraus|d'avance|de antemano",
    "praise": r"\b(?:great|perfect\w*|excellent|awesome|amazing|brilliant|fantastic|wonderful|beautiful\w*|lovely|love(?:d|s)?|"
    r"nice\w*|cool|neat|sweet|superb?|helpful|useful|impress\w+|exactly|spot on|well done|good (?:job|work|one|idea|answer|"
    r"point|choice|to know|start)|nailed|best|clever|funny|hilarious|fascinating|toll|klasse|prima|wunderbar|genial\w*|"
    r"génial|parfait\w*|excelente|perfecto|perfetto|genial|ottimo|ótimo|świetn\w+|супер|отлично|harika|bra|skvěl\w+)\b"
    r"|太好|真好|完美|很好|不错|素晴|完璧|좋아|완벽|훌륭|ممتاز|رائع|बढ़िया|बहुत अच्छ",
    "works": r"\b(?:works?|worked|working|fixed|solved|passes|passed|runs|ran|compiles|resolved|succe\w+|läuft|funktioniert|"
    r"klappt|geht|marche|fonctionne|funciona|funcionó|funziona|działa|работает|помогло|çalışıyor|fungerar|funguje|працює)\b"
    r"|可以了|成功|動きました|돼요|되네요|يعمل",
    "negated": r"\b(?:not|no|never|n't|don'?t|doesn'?t|didn'?t|isn'?t|wasn'?t|won'?t|can'?t|cannot|couldn'?t|nothing|none|nor|"
    r"nicht|kein\w*|nie|pas|rien|jamais|no|nada|non|niente|não|nie|не|ничего|değil|inte|niet|geen|không|belum|tidak)\b|n't\b"
    r"|不|没|ない|ません|안 |못 |لا |नहीं",
    "wrong": r"\b(?:wrong|incorrect\w*|false|mistake\w*|error|bad(?:ly)?|worse|worst|broken|useless|irrelevant|nonsense|terrible|"
    r"awful|horrible|ugly|rubbish|garbage|stupid|fail\w*|bug\w*|crash\w*|falsch\w*|fehler\w*|schlecht\w*|faux|fausse|mauvais\w*"
    r"|incorrecto|equivoc\w+|mal|sbagliat\w+|errado|fout\w*|źle|błąd|неправильно|ошибк\w+|yanlış|fel|špatn\w+)\b"
    r"|错|不对|違い|間違|틀렸|잘못|خطأ|गलत",
    "still": r"\b(?:still|again|keeps?|same|immer noch|wieder|noch immer|toujours|encore|sigue|todavía|ancora|ainda|nog steeds|"
    r"nadal|всё равно|всё ещё|опять|hâlâ|hala|fortfarande|pořád|досі|vẫn|masih)\b|还是|仍然|まだ|아직|ما زال|अभी भी",
    "too": r"\b(?:too|zu|viel zu|trop|demasiado|muy|troppo|demais|te|za|слишком|çok|för|příliš)\s+\w+|太|すぎ|너무|جدا",
    "i_wanted": r"\bi (?:\w+ )?(?:said|asked|meant|mean|wanted|want|told|specified|requested|need(?:ed)?|wrote|was asking|expected)\b"
    r"|\b(?:ich wollte|ich meinte|ich sagte|gemeint|je voulais|j'avais|je veux|quería|pedí|dije|volevo|ho chiesto|"
    r"eu queria|pedi|ik bedoelde|chciał\w+|я просил\w*|хотел\w*)\b|我要|我说",
    "you_did": r"\byou(?:'ve| have| also| just| only| even)? (?:did|didn'?t|haven'?t|forgot|missed|deleted|removed|changed|broke|made|"
    r"gave|used|wrote|put|added|ignored|skipped|only|keep|should(?:'ve| have|n't)?|need|must|can(?:'t|not)|are|were|mixed|left)\b",
    "should_be": r"\b(?:should(?:n't| not)?|must|supposed to|ought|needs? to be|has to be|instead|rather|actually|replace|swap|"
    r"lieber|stattdessen|sondern|soll\w*|plutôt|doit|debe\w*|en vez|invece|dovrebbe|deve|вместо|должн\w+)\b|应该|而不是",
    "shorter": r"\b(?:short(?:er)?|brief(?:er|ly)?|concise|simpler|simplify|less|fewer|longer|more (?:detail|simpl|formal|casual)\w*|"
    r"one sentence|two sentences|kürzer|court|plus court|corto|breve|più breve|curto|korter|krótko|короче|сократи)\b|短|简单|짧",
    "undo": r"\b(?:undo|revert|roll(?: it| this| that)? ?back|restore|put (?:it|that|the \w+) back|go back to|before your change|rückgängig|"
    r"annule|deshaz|annulla)\b|撤销|元に戻",
    "redo": r"\b(?:try again|redo|once more|another (?:try|attempt|go)|do (?:it|that) (?:again|over)|start over|rewrite|regenerate|"
    r"nochmal|noch einmal|recommence|otra vez|de nuevo|riprova|ещё раз|заново)\b|重新|再来|もう一度|다시",
    "doubt": r"\b(?:are you sure|really\?|isn'?t (?:it|that|this)|doesn'?t exist|made (?:that|it|this) up|that can'?t be|check again|count again|"
    r"i (?:thought|think)|bist du sicher|sicher\?|tu es sûr|seguro\?|sei sicuro|точно\?)\b|确定吗|本当",
    "confused": r"^\W*(?:huh|what|sorry|pardon|wtf|come again|hä|was|quoi|qué|cosa|o quê|что)\W*\?*$"
    r"|\b(?:i don'?t (?:get|understand|follow)|what do you mean|makes no sense|doesn'?t make (?:any )?sense|confus\w+|lost me|"
    r"what are you talking|verstehe ich nicht|comprends pas|no entiendo|non capisco|não entendi|не понимаю)\b|看不懂|わからない",
    "why_did": r"^\W*(?:but )?(?:why|warum|wieso|pourquoi|por qué|perché|почему|为什么|なぜ)\b",
    "sarcasm": r"\b(?:oh (?:great|wow|nice)|wow|genius|einstein|sure, (?:because|let)|bravo|congratulations|how helpful|toll,|"
    r"very (?:funny|helpful)\b|thanks a lot|brilliant\W|right, because|of course\b.*\.\.\.)|🙄",
    "insult": r"\b(?:idiot\w*|stupid|dumb|wtf|damn|hell|ffs|omg|bruh|crap|sucks?|lame|boring|annoying|pathetic|ridiculous)\b",
    "go_ahead": r"\b(?:go (?:ahead|for it|on)|do (?:it|that|so)|proceed|let'?s (?:do|go|use|try)|sounds (?:good|great|like)|apply (?:it|that|this)|"
    r"make (?:that|this|those) change|please (?:do|book|make|apply|continue|proceed)|mach das|mach weiter|vas-y|hazlo|adelante|procedi|"
    r"pode fazer|давай|yap|book it|i'?ll (?:take|use|go with|try|cook|listen|do) )|就这么|お願いします|그렇게",
    "builds_on": r"^\W*(?:(?:ok(?:ay)?|good|great|nice|perfect|yes|cool|thanks|thank you|very good|alright)\W+)*(?:now|next|then|also|and now|continue|"
    r"jetzt|nun|maintenant|ahora|adesso|agora|теперь)\b|\b(?:the same (?:for|with|thing)|as well|more like (?:this|that)|another one|"
    r"dasselbe|lo mismo|das gleiche)\b",
    "continue_only": r"^\W*(?:continue|go on|next|weiter|continuez|continua|siga|дальше|继续|続けて|계속)\W*$",
    "makes_sense": r"\b(?:makes (?:total |perfect )?sense|i (?:now )?(?:understand|see now|get it)|now i (?:get|see|understand|can)|got it|gotcha|"
    r"answers my question|good to know|verstanden|compris|entiendo|capito|entendi|понял\w*|jasn\w+)\b|明白了|分かりました|わかりました|알겠",
    "litotes": r"\b(?:not bad|can'?t complain|no complaints|couldn'?t be better|no objections?|not half bad|nothing to (?:add|complain)|nicht schlecht|"
    r"pas mal|nada mal|niente male|неплохо)\b|不错",
    "weak_praise": r"\b(?:not (?:exactly|quite|very|really|what)|hardly|barely|seen better|not an improvement|can'?t say)\b",
    "but": r"\b(?:but|however|though|except|only that|aber|jedoch|mais|pero|ma|però|mas|maar|ale|но|ama|men)\b|但|でも|けど|하지만",
    "forgot": r"\b(?:forgot|missing|missed|left out|lacks?|without|fehlt|vergessen|manque|oublié|falta|olvidaste|manca|dimenticat\w+|забыл\w*)\b|忘|漏",
    "own_mistake": r"\b(?:my (?:mistake|bad|fault|error)|sorry,? i|i (?:forgot|misread|mis\w+|pasted|had (?:moved|forgotten)|never started)|"
    r"oops|i was wrong|i'?m an idiot|mein fehler|ma faute|mi error|colpa mia|моя ошибка)\b",
    "never_mind": r"\b(?:never ?mind|forget (?:it|what|that|about)|ignore (?:that|my|what)|you were right|disregard|no wait|egal|laisse tomber|olvídalo)\b",
    "change_of_mind": r"\b(?:changed? (?:my|our) mind|on second thought|i'?ve decided|we'?ve (?:just )?decided|decided (?:to|against)|i'?d rather|"
    r"after all|actually,? (?:i|we|let)|cancel|doch lieber|finalement|mejor)\b",
    "decline": r"\b(?:no,? thanks?|no thank you|no need|not (?:now|necessary|needed|today|yet)|won'?t be needed|that'?s (?:it|all)|nothing else|"
    r"i'?ll do (?:that|it) myself|nein danke|non merci|no gracias|no grazie|nada más|não,? obrigad[oa])\b|不用|結構です|괜찮",
    "wh_first": r"^\W*(?:(?:and|but|so|ok(?:ay)?|then)\W+)?(?:what|who|where|when|which|how|whose|was|wer|wo|wann|welche\w*|wie|qui|où|quand|quel\w*|"
    r"comment|qué|quién|dónde|cuándo|cómo|cuál|chi|dove|quando|come|quale|onde|quem|kto|gdzie|kiedy|кто|где|когда|как)\b",
    "aux_first": r"^\W*(?:(?:and|but|so|ok(?:ay)?|then)\W+)?(?:is|are|do|does|did|can|could|would|will|has|have|should|was|were)\b",
    "can_you": r"\b(?:can|could|would|will) (?:you|u|we|i)\b|\b(?:kannst du|können sie|peux-tu|pouvez-vous|puedes|podrías|puoi|pode)\b",
    "request_first": r"^\W*(?:please |now |then |also |next |ok(?:ay)? )*(?:write|add|create|make|give|show|tell|explain|list|find|generate|build|implement|"
    r"translate|book|set|let'?s|i (?:want|need|would like|'d like)|we need|update|change|remove|move|rename|use|fix|put|describe|suggest|draw|schreib|"
    r"écris|escribe|scrivi|escreva|напиши|帮我|写)\b",
    "tells_of_self": r"^\W*(?:i (?:like|love|live|have|am|went|work|play|usually|go|hate|saw|lost|drive)|i'?m|my|we)\b",
    "quote": r"[\"“„«‘'][^\"”“»’]{12,}[\"”“»’]|\b(?:he|she|they|customer|tweet|review|boss|teacher) (?:said|says|wrote|writes|told)\b|^>",
    "error_text": r"\b\w*(?:Error|Exception)\b[:(]|\btraceback\b|\berror(?:\[\w+\]| TS\d+)?:|\bexit code [1-9]|\bfailed\b|\bnot found\b|\bundefined\b"
    r"|\bunrecognized\b|\bwarning:",
    "code": r"```|\bdef \w+\(|[{};]\s*$|=>|::|</\w+>|\bSELECT\b",
    "slash": r"^\s*/\w+",
    "assesses": r"\b(?:this|the|your|that) (?:answer|response|reply|passage|text|information|explanation)\b|\b(?:answers?|addresses|relevant|informative|"
    r"mentions?|does not (?:mention|answer|explain)|says (?:how|what|nothing))\b",
    "laugh": r"\b(?:ha(?:ha)+|lol|lmao|hehe|xd)\b|😂|🤣|哈哈|笑|ㅋㅋ",
    "good_emoji": r"[👍❤🎉✅👏😍🥰😊😀😁💯🙌🔥✨👌😄🤩💪⭐]",
    "bad_emoji": r"[👎😡🤦😴❌😞😠🤬😢😭🙁☹💩😒😕😐😤🤮👿]",
    "exclaims": r"!",
    "exclaims_twice": r"[!！]{2,}|[?？]{2,}",
    "trails_off": r"\.\.\.|…",
    "shouts": r"\b[A-Z]{4,}\b",
}
"""What a reply is searched for. Patterns ignore case, apart from the last."""

_CUES = {
    name: re.compile(pattern, re.MULTILINE if name == "shouts" else re.IGNORECASE | re.MULTILINE)
    for name, pattern in CUES.items()
}
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_PROPOSES = re.compile(
    r"\b(?:i (?:could|can|would|suggest|propose|recommend)|i'd|we could|how about|would you like|shall i|should i|do you want|let me know"
    r"|soll ich|ich schlage|je propose|sugiero|propongo|предлагаю)\b|建议",
    re.IGNORECASE,
)


def cues(request: str, answer: str, reply: str) -> list[float]:
    """[len(CUE_NAMES)] What the reply, and its place behind request and answer, looks like."""
    found = {name: float(pattern.search(reply) is not None) for name, pattern in _CUES.items()}
    words = _words(reply)
    asked = answer.rstrip(" \"'*)").endswith(("?", "？"))
    question = "?" in reply or "？" in reply
    offered = asked or _PROPOSES.search(answer[-400:]) is not None
    in_words = found["wh_first"] or found["aux_first"]
    signs = (
        "no_first",
        "wrong",
        "negated",
        "still",
        "too",
        "i_wanted",
        "you_did",
        "should_be",
        "doubt",
        "confused",
        "thanks",
        "praise",
    )
    plain = not any(found[name] for name in signs)
    return [
        *found.values(),
        float(question),
        float(reply.rstrip().endswith(("?", "？"))),
        float(asked),
        float(offered),
        float(offered) * max(found["yes_first"], found["go_ahead"]),
        float(asked) * float(len(words) <= 8) * float(plain),
        float(offered) * found["no_first"] * float(len(words) <= 8),
        float(question and plain and bool(in_words)),
        float(plain),
        found["praise"] * found["negated"],
        found["works"] * found["negated"],
        found["praise"] * found["but"],
        max(found["thanks"], found["praise"]) * float(question),
        float(len(words) <= 3),
        min(1.0, math.log1p(len(words)) / 5),
        float(not reply.isascii()),
        likeness(request, reply),
        likeness(answer, reply),
        float(likeness(request, reply) > 0.6),
    ]


def likeness(a: str, b: str) -> float:
    """Share of the shorter text's words that the other has too; 0 where either has fewer than two."""
    first, second = set(_words(a)), set(_words(b))
    smaller = min(len(first), len(second))
    return len(first & second) / smaller if smaller > 1 else 0.0


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


CUE_COUNT = len(cues("", "", ""))

LETTER_BUCKETS = 4096
WORDING_COUNT = CUE_COUNT + LETTER_BUCKETS


def wording(request: str, answer: str, reply: str) -> list[float]:
    """[WORDING_COUNT] The cues, and behind them the reply's hashed words, word pairs and letter sequences."""
    return [*cues(request, answer, reply), *_hashed(reply)]


def _hashed(text: str) -> list[float]:
    """[LETTER_BUCKETS] Signed counts in buckets, of length 1; all 0 for an empty text."""
    folded = " ".join(text.lower().split())[:600]
    words = re.findall(r"\w+(?:'\w+)?|[^\w\s]", folded)
    padded = f" {folded} "
    grams = {
        *(f"w:{word}" for word in words),
        *(f"b:{first} {second}" for first, second in pairwise(words)),
        *(f"f:{word}" for word in words[:1]),
        *(f"f2:{first} {second}" for first, second in pairwise(words[:2])),
        *(f"c:{padded[at : at + n]}" for n in (3, 4) for at in range(len(padded) - n + 1)),
    }
    buckets = [0.0] * LETTER_BUCKETS
    for gram in grams:
        # A sign for each, so that what shares a bucket by chance cancels out on average.
        value = crc32(gram.encode())
        buckets[value % LETTER_BUCKETS] += 1.0 if value >> 31 else -1.0
    length = math.sqrt(sum(value * value for value in buckets))
    return [value / length for value in buckets] if length else buckets
