// Command posthaste moves events from a Postgres outbox table to Redis Streams. See posthaste --help.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"reflect"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/gendocs"
	"posthaste/internal/replay"
	"posthaste/internal/shadow"
)

// Exit codes. They are part of the contract.
const (
	exitFailure  = 1
	exitBadUsage = 2
)

// commandLine is filled in by the parser. Helps of commands, and those of flags that do not fit into their line, are in
// help.txt.
type commandLine struct {
	app.Settings

	VersionFlag kong.VersionFlag `name:"version" help:"Print the version."`

	Migrate     migrateCmd      `cmd:"" group:"Run"`
	Serve       serveCmd        `cmd:"" group:"Run" settings:"Servers,Names,API,Admin listener,Process"`
	Relay       relayCmd        `cmd:"" group:"Run" settings:"Servers,Names,Relay,Admin listener,Process"`
	Consume     app.Consume     `cmd:"" group:"Run"`
	Deliver     app.Deliver     `cmd:"" group:"Run"`
	Healthcheck app.Healthcheck `cmd:"" group:"Run" settings:"API,Admin listener"`
	Mode        modeCmd         `cmd:"" group:"Operate"`
	Status      app.Status      `cmd:"" group:"Operate" settings:"Servers,Names,Relay"`
	Dead        deadCmd         `cmd:"" group:"Operate"`
	Replay      replay.Options  `cmd:"" group:"Operate"`
	Streams     streamsCmd      `cmd:"" group:"Operate"`
	Phantoms    phantomsCmd     `cmd:"" group:"Operate"`
	Audit       auditCmd        `cmd:"" group:"Operate"`
	Groups      groupsCmd       `cmd:"" group:"Operate"`
	Trace       traceCmd        `cmd:"" group:"Operate"`
	Doctor      app.Doctor      `cmd:"" group:"Operate" settings:"Servers,Names,Relay"`
	Adopt       adoptCmd        `cmd:"" group:"Operate"`
	Bridge      bridgeCmd       `cmd:"" group:"Operate"`
	Credits     creditsCmd      `cmd:"" group:"Operate"`
	Keygen      app.Keygen      `cmd:"" group:"Operate" settings:"none"`
	Uninstall   uninstallCmd    `cmd:"" group:"Operate"`
	Shadow      shadow.Options  `cmd:"" group:"Try and measure"`
	Dev         app.Dev         `cmd:"" group:"Try and measure" settings:"Servers,Names,Relay,Admin listener,Process"`
	Demo        demoCmd         `cmd:"" group:"Try and measure" settings:"Process"`
	Bench       benchCmd        `cmd:"" group:"Try and measure" settings:"Servers"`
	Prove       proveCmd        `cmd:"" group:"Try and measure" settings:"Process"`

	Shown      settingsCmd        `cmd:"" name:"settings" group:"About" settings:"all"`
	Completion gendocs.Completion `cmd:"" group:"About" settings:"none"`
	Version    versionCmd         `cmd:"" group:"About" settings:"none"`
	HelpOn     helpCmd            `cmd:"" name:"help" group:"About" settings:"none"`
	GenDocs    gendocs.Options    `cmd:"" hidden:""`

	ProveConsumer proveConsumerCmd `cmd:"" hidden:""`
}

// quiet discards the log of the Redis client. The client also returns each of these errors, and the commands report
// them.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

func main() {
	redis.SetLogger(quiet{})
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-ctx.Done()
		stop() // a second signal ends the process at once
	}()
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole program, with arguments and streams as parameters.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	var line commandLine
	exited := -1
	parser, err := newParser(&line, kong.Writers(stdout, stderr), kong.Exit(func(code int) { exited = code }))
	if err != nil {
		fmt.Fprintln(stderr, "posthaste:", err)
		return exitFailure
	}
	kctx, err := parser.Parse(helpArgs(args))
	if exited >= 0 {
		return exited // --help or --version
	}
	if err != nil {
		fmt.Fprintf(stderr, "posthaste: %v (see posthaste --help)\n", err)
		return exitBadUsage
	}
	line.Given = flagsOf(kctx)
	settings := line.Settings
	if strings.HasPrefix(kctx.Command(), "healthcheck") {
		settings = settings.OfAdminListener()
	}
	config, err := settings.Parse()
	if err != nil {
		for _, fault := range faults(err) {
			fmt.Fprintln(stderr, "posthaste:", fault)
		}
		return exitBadUsage
	}
	config.Version = version
	log := config.LoggerTo(stderr)
	line.WarnOfSecrets(log)
	line.WarnOfUnknown(parser.Model, log)
	e := &env{
		IO:     cli.IO{Stdin: stdin, Stdout: stdout, Stderr: stderr},
		config: config, settings: line.Settings, model: parser.Model,
	}
	kctx.BindTo(ctx, (*context.Context)(nil))
	err = kctx.Run(e, e.config, e.IO, e.model)
	if err == nil {
		return 0
	}
	if !errors.Is(err, cli.ErrSaid) {
		text := cli.Line(err, config.RedisAddr())
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			text = "interrupted"
		}
		fmt.Fprintln(stderr, "posthaste:", text)
	}
	var exit *cli.ExitError
	switch {
	case errors.As(err, &exit):
		return exit.Code
	case errors.As(err, new(*cli.UsageError)):
		return exitBadUsage
	}
	return exitFailure
}

// newParser returns the parser that fills in line.
func newParser(line *commandLine, more ...kong.Option) (*kong.Kong, error) {
	return kong.New(line, append(more, kong.Name("posthaste"), line.Decoding(), kong.Vars{"version": versionLine()},
		kong.Description("A transactional outbox: Postgres to Redis Streams, from the write-ahead log or by polling."),
		kong.TypeMapper(reflect.TypeFor[time.Duration](), kong.MapperFunc(parseDuration)),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true}), kong.Help(gendocs.Help),
		kong.ValueFormatter(gendocs.Meaning), gendocs.HelpTexts(helpFile))...)
}

// flagsOf returns the names of the flags that were given on the command line.
func flagsOf(kctx *kong.Context) (names []string) {
	for _, p := range kctx.Path {
		if p.Flag != nil && !p.Resolved {
			names = append(names, p.Flag.Name)
		}
	}
	return names
}

// faults returns the errors that a joined error consists of.
func faults(err error) []error {
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		return j.Unwrap()
	}
	return []error{err}
}
