package admin

import (
	"regexp"
	"strings"
	"unicode"
)

var plainWord = regexp.MustCompile(`^[a-zA-Z0-9_.:/@%+,-]+$`)

// DropGroupCommand is the command that drops a consumer group, to be pasted into a shell. Anybody who may write to Redis
// chooses a group's name, so it is quoted; what cannot be printed is shown as a question mark, and names no group.
func DropGroupCommand(stream, group string) string {
	return "posthaste groups drop --stream=" + quoted(stream) + " --group=" + quoted(group)
}

func quoted(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	word = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, word)
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
