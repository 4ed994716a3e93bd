package app

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"posthaste/api"
	"posthaste/internal/cli"
)

// Keygen is the command that makes an API key.
type Keygen struct {
	User    string `help:"Id of the user that the key stands for, or * for any user." required:""`
	Name    string `help:"Name for logs."`
	Scopes  string
	Expires string `help:"When the key ends: a date, or a time in RFC 3339. Default: never."`
}

// Run prints two lines: on standard output the line for the file of API keys, and on standard error the key. The line
// has only a hash of the key and is not secret.
func (k Keygen) Run(o cli.IO) error {
	key := "ph_" + rand.Text()
	sum := sha256.Sum256([]byte(key))
	line := []string{hex.EncodeToString(sum[:]), k.User}
	for _, f := range [][2]string{{"name", k.Name}, {"scopes", k.Scopes}, {"expires", k.Expires}} {
		if f[1] != "" {
			line = append(line, f[0]+"="+f[1])
		}
	}
	text := strings.Join(line, " ")
	if len(strings.Fields(text)) != len(line) {
		return cli.Usage("a value has a space in it")
	}
	if _, err := api.ParseKeys(strings.NewReader(text)); err != nil {
		return cli.Usage(strings.TrimPrefix(err.Error(), "file of API keys, line 1: "))
	}
	_, err := fmt.Fprintln(o.Stdout, text)
	_, _ = fmt.Fprintln(o.Stderr, key)
	return err
}
