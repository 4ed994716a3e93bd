// Package statement returns SQL statements that a package embeds, one file each in its folder queries.
package statement

import (
	"embed"
	"strings"
)

// In returns a function that returns the text of queries/<name>.sql in files. It panics for an unknown name: the
// files are embedded, so a missing one is a bug.
func In(files embed.FS) func(name string) string {
	list, err := files.ReadDir("queries")
	if err != nil {
		panic(err)
	}
	texts := make(map[string]string, len(list))
	for _, f := range list {
		b, err := files.ReadFile("queries/" + f.Name())
		if err != nil {
			panic(err)
		}
		texts[strings.TrimSuffix(f.Name(), ".sql")] = string(b)
	}
	return func(name string) string {
		text, ok := texts[name]
		if !ok {
			panic("no statement is called " + name)
		}
		return text
	}
}
