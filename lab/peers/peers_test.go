package main

import (
	"bytes"
	"strings"
	"testing"

	"posthaste/internal/cli"
)

// The load alone is measured for each table of the chosen peers, before them.
func TestChoose(t *testing.T) {
	t.Parallel()
	p := &programs{}
	b, err := p.parse([]string{"--peers=posthaste,watermill"}, cli.IO{})
	var names []string
	for _, p := range b.Peers {
		names = append(names, p.Name)
	}
	if got := strings.Join(names, ", "); err != nil || got != "none, posthaste, none (watermill), watermill" {
		t.Fatalf("measured are %s, %v", got, err)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, arg := range []string{
		"--rounds=0", "--seconds=0", "--size=1", "--rates=x", "--rates=-1", "--peers=nobody", "something",
	} {
		o := cli.IO{Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}}
		if _, err := (&programs{}).parse([]string{arg}, o); err == nil {
			t.Errorf("%s is not refused", arg)
		}
	}
}
