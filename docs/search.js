// The search takes a word that begins with - for one that must not be there. In an error it is an option: --steps.
for (const event of ["input", "keyup"])
  document.addEventListener(event, ({target}) => {
    if (target.matches?.(".md-search__input") && /(^|\s)[-+]+\w/.test(target.value))
      target.value = target.value.replace(/(^|\s)[-+]+(?=\w)/g, "$1")
  }, true)
