package gendocs

import (
	"fmt"
	"io"
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
	return map[string]func(w io.Writer, commands, words []string) error{
		"bash": bash, "zsh": zsh, "fish": fish,
	}[c.Shell](o.Stdout, commands, words)
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

// cases returns the lines of a shell's case statement: the words of each command.
func cases(commands, words []string, form string) string {
	var b strings.Builder
	for i, path := range commands {
		fmt.Fprintf(&b, form, path, words[i])
	}
	return b.String()
}

func bash(w io.Writer, commands, words []string) error {
	_, err := fmt.Fprintf(w, `# bash completion for posthaste
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
`, strings.Join(commands[1:], "|"), cases(commands, words, "\t'%s') words='%s' ;;\n"))
	return err
}

func zsh(w io.Writer, commands, words []string) error {
	_, err := fmt.Fprintf(w, `#compdef posthaste
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
`, strings.Join(commands[1:], "|"), cases(commands, words, "\t'%s') compadd -- %s ;;\n"))
	return err
}

func fish(w io.Writer, commands, words []string) error {
	_, err := fmt.Fprintf(w, `# fish completion for posthaste
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
`, strings.Join(commands[1:], " "), cases(commands, words, "\tcase '%s'\n\t\tprintf '%%s\\n' %s\n"))
	return err
}
