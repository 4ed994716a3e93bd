package prove

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// page returns the report as Markdown.
func (r *Report) page() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# A campaign of faults\n\n%s, on %s with %d cores", r.At.Format("2006-01-02 15:04 UTC"),
		r.Machine.Platform, r.Machine.Cores)
	for _, name := range slices.Sorted(maps.Keys(r.Machine.Versions)) {
		fmt.Fprintf(&b, ", %s %s", name, r.Machine.Versions[name])
	}
	fmt.Fprintf(&b, ".\n\n```text\n%s\n```\n\n", r.Command)
	for _, line := range r.sentences() {
		fmt.Fprintf(&b, "- %s\n", line)
	}
	b.WriteString("\n| fault | what is done | alone | in pairs | recovery, median | worst | longest wait |\n" +
		"|---|---|---|---|---|---|---|\n")
	for _, k := range r.Kinds {
		fmt.Fprintf(&b, "| `%s` | %s | %d | %d | %.1f s | %.1f s | %.1f s |\n", k.Name, k.About, k.Alone, k.InPairs,
			k.Median, k.Worst, k.Waited)
	}
	b.WriteString("\n![timeline](timeline.svg)\n")
	if r.Broken != nil {
		fmt.Fprintf(&b, "\n## Broken: %s\n\n%s\n\n```\n%s\n```\n", r.Broken.Promise, r.Broken.What,
			strings.Join(r.Story, "\n"))
	}
	return b.String()
}
