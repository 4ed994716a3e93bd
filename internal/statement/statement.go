// Package statement finds SQL statements that a package embeds, one file each in its folder queries.
package statement

import "embed"

// In returns a function that returns the text of queries/<name>.sql in files. It panics for a name that is not there:
// the files are embedded, so a missing one is a broken build.
func In(files embed.FS) func(name string) string {
	return func(name string) string {
		b, err := files.ReadFile("queries/" + name + ".sql")
		if err != nil {
			panic(err)
		}
		return string(b)
	}
}
