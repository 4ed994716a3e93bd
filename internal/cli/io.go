package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"posthaste/internal/ops"
)

// IO has the streams of a command.
type IO struct {
	// Stdin is read for answers, if it is a terminal.
	Stdin io.Reader
	// Stdout takes the results, Stderr everything else: questions, progress, warnings.
	Stdout, Stderr io.Writer
}

// JSON prints v as indented JSON.
func (o IO) JSON(v any) error {
	enc := json.NewEncoder(o.Stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// Confirm requests confirmation of an action that cannot be undone. The wait for the answer has no time limit: ctx is
// that of the command, not of one of its calls. If Stdin is not a terminal, it refuses.
func (o IO) Confirm(ctx context.Context, yes bool, question string) error {
	if yes {
		return nil
	}
	if !IsTerminal(o.Stdin) {
		return errors.New("this needs confirmation, and there is no terminal: repeat the command with --yes")
	}
	fmt.Fprintf(o.Stderr, "%s [y/N] ", ops.Printable(question))
	answer := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(o.Stdin).ReadString('\n')
		answer <- strings.ToLower(strings.TrimSpace(line))
	}()
	select {
	case a := <-answer:
		if a == "y" || a == "yes" {
			return nil
		}
	case <-ctx.Done(): // Ctrl-C, which does not end the reading
		fmt.Fprintln(o.Stderr)
	}
	return errors.New("nothing was done")
}
