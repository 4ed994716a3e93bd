package gendocs

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"posthaste/internal/cli"
)

// usualSettings are the groups of settings of a command whose tag "settings" names no others; allSettings are those of
// "all".
const (
	usualSettings = "Servers,Names"
	allSettings   = "Servers,Names,Relay,API,Admin listener,Process"
)

// SettingGroups returns the groups of settings that a command uses; nil for no command.
func SettingGroups(n *kong.Node) []string {
	shown := ""
	for ; n != nil && n.Tag != nil && shown == ""; n = n.Parent {
		shown = n.Tag.Get("settings")
		if n.Parent != nil && n.Parent.Type == kong.ApplicationNode && shown == "" {
			shown = usualSettings
		}
	}
	if shown == "all" {
		shown = allSettings
	}
	return strings.Split(shown, ",")
}

// Completion is the command that prints a script for a shell.
type Completion struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"The shell: bash, zsh or fish."`
}

// Run prints the script, which walks along the words of the line to the command, whose words it then offers.
func (c Completion) Run(o cli.IO, m *kong.Application) error {
	var commands, words []string
	eachCommand(m.Node, "", func(path string, n *kong.Node) {
		commands = append(commands, path)
		words = append(words, strings.Join(wordsOf(m, n), " "))
	})
	s := shells[c.Shell]
	var cases strings.Builder
	for i, path := range commands {
		fmt.Fprintf(&cases, s.form, path, words[i])
	}
	_, err := fmt.Fprintf(o.Stdout, s.script, strings.Join(commands[1:], s.separator), cases.String())
	return err
}

// eachCommand visits a command and all below it, each with its path: /dead/list. That of the program is "".
func eachCommand(n *kong.Node, path string, visit func(path string, n *kong.Node)) {
	visit(path, n)
	for _, c := range n.Children {
		if !c.Hidden {
			eachCommand(c, path+"/"+c.Name, visit)
		}
	}
}

// wordsOf returns what may follow a command: commands, arguments from a fixed set, its flags, and its settings.
func wordsOf(m *kong.Application, n *kong.Node) (words []string) {
	for _, c := range n.Children {
		if !c.Hidden {
			words = append(words, c.Name)
		}
	}
	for _, p := range n.Positional {
		if p.Enum != "" {
			words = append(words, strings.Split(p.Enum, ",")...)
		}
	}
	flags, groups := slices.Clone(m.Flags), SettingGroups(n)
	if n != m.Node {
		flags = append(flags, n.Flags...)
	}
	for _, f := range flags {
		if f.Group == nil && !f.Hidden || f.Group != nil && slices.Contains(groups, f.Group.Title) {
			words = append(words, "--"+f.Name)
		}
	}
	return slices.DeleteFunc(words, func(w string) bool { return w == "" })
}

// shells are the scripts, by shell. Each is a format of the paths of all commands, joined by the separator, and of the
// lines of a case statement, whose form is a format of a path and of the words that may follow it.
var shells = map[string]struct{ separator, form, script string }{
	"bash": {"|", "\t'%s') words='%s' ;;\n", `# bash completion for posthaste
_posthaste() {
	local at= word words=
	for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
		case "$at/$word" in
		%s) at="$at/$word" ;;
		esac
	done
	case "$at" in
%s	esac
	COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _posthaste posthaste
`},
	"zsh": {"|", "\t'%s') compadd -- %s ;;\n", `#compdef posthaste
_posthaste() {
	local at= word
	for word in "${(@)words[2,CURRENT-1]}"; do
		case "$at/$word" in
		%s) at="$at/$word" ;;
		esac
	done
	case "$at" in
%s	esac
	_files
}
if [ "$funcstack[1]" = _posthaste ]; then _posthaste "$@"; else compdef _posthaste posthaste; fi
`},
	"fish": {" ", "\tcase '%s'\n\t\tprintf '%%s\\n' %s\n", `# fish completion for posthaste
function __posthaste_words
	set -l at ''
	for word in (commandline -opc)[2..]
		if contains -- "$at/$word" %s
			set at "$at/$word"
		end
	end
	switch "$at"
%s	end
end
complete -c posthaste -a '(__posthaste_words)'
`},
}
