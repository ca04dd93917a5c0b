// The look of Markdown on the text as it is written: code, bold, headings. All characters stay, so tokens stay whole.

// In the order of precedence: what is in code is nothing else.
const MARKS = [
  ["code", /```[^\n]*\n[\s\S]*?(?:\n```(?=\n|$)|$)/g],
  ["code", /`[^`\n]+`/g],
  ["strong", /\*\*[^*\n]+\*\*/g],
  ["strong", /^#{1,6} .*$/gm],
];

// For each character place in `places`, ascending, the class of the mark around it, or "".
export function marksAt(text, places) {
  const spans = spansOf(text);
  let at = 0;
  return places.map((place) => {
    while (at < spans.length && spans[at][1] <= place) at += 1;
    return at < spans.length && spans[at][0] <= place ? spans[at][2] : "";
  });
}

// [begin, end, class] of the marks, in order, none within another.
function spansOf(text) {
  const spans = [];
  for (const [name, pattern] of MARKS)
    for (const { index, 0: found } of text.matchAll(pattern)) {
      const end = index + found.length;
      if (!spans.some(([from, upto]) => index < upto && end > from)) spans.push([index, end, name]);
    }
  return spans.sort((a, b) => a[0] - b[0]);
}
