// A filter for the tables of operators: rows that have all words of the input stay.
(() => {
  const groups = [...document.querySelectorAll(".operator-group")];
  if (!groups.length) return;
  const rows = groups.flatMap((group) => [...group.querySelectorAll("tbody tr")]);
  const input = document.createElement("input");
  input.type = "search";
  input.className = "operator-filter";
  input.placeholder = "Filter: conv2d, refused, integers ...";
  input.setAttribute("aria-label", "Filter the operators");
  const count = document.createElement("p");
  count.setAttribute("aria-live", "polite");
  groups[0].before(input, count);

  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    for (const group of groups) group.hidden = !group.querySelector("tbody tr:not([hidden])");
    count.textContent = words.length ? `${shown} of ${rows.length} operators` : "";
  };
  input.addEventListener("input", filter);
  input.value = new URLSearchParams(location.search).get("filter") ?? "";
  filter();
})();
