// Package secretfile reads secrets from files, again for each connection, because other programs replace passwords
// while a process runs.
package secretfile

import (
	"fmt"
	"net/url"
	"os"
	"strings"
)

// Parameter is the parameter of an address, of Postgres or Redis, that holds a File.
const Parameter = "posthaste_secret"

// File is a file of one line: a password, or an address with user and password.
type File struct {
	// Setting is the variable that names the file. It ends in _URL_FILE if the file has an address.
	Setting string
	Path    string
}

// Parse is the inverse of String.
func Parse(text string) (f File) {
	f.Setting, f.Path, _ = strings.Cut(text, ":")
	return f
}

// String returns f as the value of Parameter.
func (f File) String() string { return f.Setting + ":" + f.Path }

// HasURL reports whether the file has an address, not only a password.
func (f File) HasURL() bool { return strings.HasSuffix(f.Setting, "_URL_FILE") }

// Read returns the line of the file. Its errors name the setting and do not quote the file.
func (f File) Read() (string, error) {
	text, err := os.ReadFile(f.Path)
	line := strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), "\r")
	switch {
	case err != nil: // it names the path
	case strings.TrimSpace(line) == "":
		err = fmt.Errorf("%s is empty", f.Path)
	case strings.ContainsAny(line, "\r\n"):
		err = fmt.Errorf("%s has more than one line", f.Path)
	default:
		return line, nil
	}
	return "", fmt.Errorf("%s: %w", f.Setting, err)
}

// Into returns address, a URL or one in libpq's keyword=value form, with f as Parameter.
func (f File) Into(address string) string {
	if !strings.Contains(address, "://") {
		return address + " " + Parameter + "='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(f.String()) + "'"
	}
	separator := "?"
	if strings.Contains(address, "?") {
		separator = "&"
	}
	return address + separator + Parameter + "=" + url.QueryEscape(f.String())
}
