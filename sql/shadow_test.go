package sql_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

// statement is one SQL text of the project, with its origin.
type statement struct{ where, text string }

// allStatements returns every statement that a process of posthaste may run: the embedded files, the migrations, and
// the literals in the Go code. Values inserted at run time are identifiers or numbers; here they are "x".
func allStatements(t *testing.T) []statement {
	t.Helper()
	var all []statement
	root := os.DirFS("..")
	err := fs.WalkDir(root, ".", func(path string, e fs.DirEntry, err error) error {
		skipped := []string{
			"bin", "lab", "examples", "grafana", "internal/lab/testenv", "internal/demo",
			"internal/bench", "scripts/postgres", "sql/testdata",
		}
		switch {
		case err != nil:
			return err
		case e.IsDir():
			if slices.Contains(skipped, path) || strings.HasPrefix(path, ".") && path != "." {
				return fs.SkipDir
			}
		case strings.HasSuffix(path, ".sql") && path != "scripts/roles.sql":
			b, err := fs.ReadFile(root, path)
			all = append(all, statement{path, string(b)})
			return err
		case strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go"):
			found, err := literals(root, path)
			all = append(all, found...)
			return err
		}
		return nil
	})
	if err != nil || len(all) < 120 {
		t.Fatalf("found %d statements, %v", len(all), err)
	}
	return all
}

var beginsStatement = regexp.MustCompile(`^\s*(SELECT|INSERT|UPDATE|DELETE|WITH|CREATE|ALTER|DROP|SET|LOCK) `)

// literals returns the statements in a Go file.
func literals(root fs.FS, path string) ([]statement, error) {
	source, err := fs.ReadFile(root, path)
	if err != nil {
		return nil, err
	}
	files := token.NewFileSet()
	f, err := parser.ParseFile(files, path, source, 0)
	if err != nil {
		return nil, err
	}
	var found []statement
	ast.Inspect(f, func(n ast.Node) bool {
		e, ok := n.(ast.Expr)
		if !ok {
			return true
		}
		text, ok := folded(e)
		if ok && beginsStatement.MatchString(text) {
			found = append(found, statement{files.Position(e.Pos()).String(), text})
		}
		return !ok
	})
	return found, nil
}

// folded returns the text of a string literal, or of a sum that contains one.
func folded(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, e.Kind == token.STRING && err == nil
	case *ast.BinaryExpr:
		left, isLeft := folded(e.X)
		right, isRight := folded(e.Y)
		if e.Op != token.ADD || !isLeft && !isRight {
			return "", false
		}
		if !isLeft {
			left = "x"
		}
		if !isRight {
			right = "x"
		}
		return left + right, true
	}
	return "", false
}

var (
	notCode = regexp.MustCompile(`'(?:[^']|'')*'|--[^\n]*`)
	aCall   = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_.]*)\s*\(`)
	// aType is a type with a length. ofSQL are SQL's own forms, which use pg_catalog themselves, as does unnest with
	// several arguments.
	aType      = regexp.MustCompile(`^(varchar|char|bit)\(\d+\)`)
	ofSQL      = regexp.MustCompile(`^(extract\(|substring\().* FROM |^unnest\(.*,`)
	anOperator = regexp.MustCompile(`[-+*/<>=~!@#%^&|?]+`)
)

// unshadowable are the calls that need no schema: they have no arguments, so no other function matches better, and
// exist since Postgres 14. A function with arguments can be shadowed by a better match of the same name.
var unshadowable = []string{
	"clock_timestamp", "count", "current_database", "gen_random_uuid", "now", "pg_control_system",
	"pg_current_snapshot",
	"pg_current_wal_flush_lsn", "pg_current_wal_insert_lsn", "pg_current_wal_lsn", "pg_current_xact_id",
	"pg_is_in_recovery", "pg_postmaster_start_time",
}

// calls returns the functions that text calls; open are those that can be shadowed by another schema's.
func calls(text string, functions map[string]bool) (called, open []string) {
	text = notCode.ReplaceAllString(text, "''")
	for _, at := range aCall.FindAllStringSubmatchIndex(text, -1) {
		name, rest := strings.ToLower(text[at[2]:at[3]]), text[at[2]:]
		bare, qualified := strings.CutPrefix(name, "pg_catalog.")
		args := arguments(text[at[1]:])
		switch {
		case !functions[bare] && !strings.HasPrefix(bare, "pg_"),
			aType.MatchString(rest), ofSQL.MatchString(bare + "(" + args):
			continue
		case qualified, slices.Contains(unshadowable, bare) && strings.Trim(args, " *") == "":
		default:
			open = append(open, bare)
		}
		called = append(called, bare)
	}
	return called, open
}

// arguments returns the text up to the closing parenthesis, without nested parentheses.
func arguments(text string) string {
	depth, outer := 1, strings.Builder{}
	for _, c := range text {
		switch {
		case c == '(':
			depth++
		case c == ')':
			depth--
		case depth == 1:
			_, _ = outer.WriteRune(c)
		}
		if depth == 0 {
			break
		}
	}
	return outer.String()
}

// A role that may create in the schema cannot make a process of posthaste call its functions, which would run with
// the rights of that process. Every function with arguments is called with its schema. Operators with a schema are
// illegible: instead their arguments have exactly the types of one in pg_catalog, which comes first. The test plants
// exact matches of everything else.
func TestNothingPlantedIsCalled(t *testing.T) {
	t.Parallel()
	d := testenv.Empty(t)
	functions := map[string]bool{}
	for _, name := range testenv.Value[[]string](t, d,
		"SELECT array_agg(DISTINCT proname::text) FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace") {
		functions[name] = true
	}
	all := allStatements(t)
	used, operators := map[string]bool{"pg_try_advisory_lock": true, "pg_advisory_unlock": true}, map[string]bool{}
	for _, s := range all {
		called, open := calls(s.text, functions)
		for _, name := range open {
			t.Errorf("%s: %s could be another schema's: call pg_catalog.%s", s.where, name, name)
		}
		for _, name := range called {
			used[name] = true
		}
	}
	known := testenv.Value[[]string](t, d, "SELECT array_agg(DISTINCT oprname::text) FROM pg_operator")
	for _, s := range all {
		for _, op := range anOperator.FindAllString(notCode.ReplaceAllString(s.text, "''"), -1) {
			if slices.Contains(known, op) {
				operators[op] = true
			}
		}
	}
	// IN, BETWEEN, LIKE, IS DISTINCT FROM and nullif use these operators.
	for _, op := range []string{"=", "<>", "<=", ">=", "~~"} {
		operators[op] = true
	}
	quoted := func(names map[string]bool) string {
		return `"` + strings.Join(slices.Sorted(maps.Keys(names)), `","`) + `"`
	}
	// The schema's owner lets another role create in it that is no superuser, as Postgres 14 does in public.
	owner, mine := role(t, d, "owner", "CREATE ON DATABASE "+d.Name,
		// The settings of a test campaign's own server, by its superuser.
		"EXECUTE ON FUNCTION pg_catalog.pg_reload_conf(), pg_catalog.pg_switch_wal()")
	d.Exec(t, "CREATE SCHEMA app AUTHORIZATION "+owner)
	thief, theirs := role(t, d, "thief", "USAGE, CREATE ON SCHEMA app")
	traps, err := os.ReadFile("testdata/traps.sql")
	must(t, err)
	plant := strings.NewReplacer("$SCHEMA", "app", "$OPERATORS", quoted(operators), "$FUNCTIONS", quoted(used)).
		Replace(string(traps))
	if _, err := connect(t, theirs).Exec(t.Context(), plant); err != nil {
		t.Fatalf("plant: %v", err)
	}
	// The migrations run with the planted functions, and their results (defaults, domains, indexes) use none of them.
	log := slog.New(slog.DiscardHandler)
	if _, err := sql.Migrate(t.Context(), mine, "app", log); err != nil {
		t.Fatalf("migrate: %v", err)
	}
	cfg, err := sql.ConnConfig(mine, "app", "traps")
	must(t, err)
	c, err := sql.Connect(t.Context(), cfg)
	must(t, err)
	t.Cleanup(func() { _ = c.Close(t.Context()) })
	for _, open := range []string{ // the traps are traps
		"SELECT hashtextextended($1::text, 0)", "SELECT $1::bigint & 15",
		"SELECT array_agg(x) FROM generate_series(1, 2) x",
		"SELECT nullif(1::bigint, 2::smallint), 'a'::varchar || 'b'", "SELECT pg_try_advisory_lock($1)",
	} {
		if err := tryPlan(t, c, open); err == nil {
			t.Errorf("%s was not caught", open)
		}
	}
	clean := connect(t, testenv.Postgres(t).URL)
	for _, s := range runnableAlone(t, all) {
		err := tryPlan(t, c, s.text)
		// A literal may be a fragment, or for another version.
		if err != nil && (strings.HasSuffix(s.where, ".sql") || tryPlan(t, clean, s.text) == nil) {
			t.Errorf("%s: %v", s.where, err)
		}
	}
	// Refused if an object of the owner depends on a planted one. Casts have no owner.
	d.Exec(t, "DROP CAST (text AS app.bait); DROP CAST (bigint AS app.bait); DROP CAST (app.bait AS bigint)")
	if _, err := d.Pool.Exec(t.Context(), "DROP OWNED BY "+thief+" RESTRICT"); err != nil {
		t.Errorf("drop the traps: %v", err)
	}
}

// runnableAlone drops statements that cannot be planned alone: utility statements, and the halves of replay's.
func runnableAlone(t *testing.T, all []statement) []statement {
	t.Helper()
	var alone []statement
	history := map[string]string{}
	for _, s := range all {
		if strings.Contains(s.where, "replay_all.sql") || strings.Contains(s.where, "replay_few.sql") {
			history[s.where] = s.text
		}
	}
	for _, s := range all {
		verb := strings.ToUpper(strings.Fields(notCode.ReplaceAllString(strings.TrimSpace(s.text), ""))[0])
		switch {
		case history[s.where] != "", strings.Contains(s.where, "migrations/"),
			!slices.Contains([]string{"SELECT", "INSERT", "UPDATE", "DELETE", "WITH"}, verb):
		case strings.Contains(s.text, "FROM history\n"):
			for where, part := range history {
				alone = append(alone, statement{where + " " + s.where, part + s.text})
			}
		default:
			alone = append(alone, s)
		}
	}
	if len(alone) < 110 {
		t.Fatalf("only %d statements", len(alone))
	}
	return alone
}

// tryPlan plans text for unknown parameters and initializes its execution, which checks the right to call each
// function.
func tryPlan(t *testing.T, c *pgx.Conn, text string) error {
	t.Helper()
	ctx := t.Context()
	defer func() { _, _ = c.Exec(ctx, "DEALLOCATE ALL") }()
	if _, err := c.Exec(ctx, "SET plan_cache_mode = force_generic_plan; PREPARE stmt AS "+text); err != nil {
		return err
	}
	var n int
	if err := c.QueryRow(ctx,
		"SELECT pg_catalog.cardinality(parameter_types) FROM pg_prepared_statements WHERE name = 'stmt'",
		pgx.QueryExecModeSimpleProtocol).Scan(&n); err != nil {
		return err
	}
	args := ""
	if n > 0 {
		args = "(NULL" + strings.Repeat(", NULL", n-1) + ")"
	}
	_, err := c.Exec(ctx, fmt.Sprintf("EXPLAIN EXECUTE stmt%s", args), pgx.QueryExecModeSimpleProtocol)
	return err
}
