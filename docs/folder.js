// Browsers do not let the search of a website run in pages that are opened from a folder: say what helps instead.
if (location.protocol === "file:") {
  for (const search of document.querySelectorAll(".md-search")) {
    const note = document.createElement("span");
    note.id = "no-search";
    note.style.fontSize = ".65rem";
    note.textContent = "To search, run python -m http.server in the folder of this website";
    search.replaceChildren(note);
  }
  for (const button of document.querySelectorAll("label[for=__search]")) button.hidden = true;
}
